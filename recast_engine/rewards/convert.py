"""Published checkpoints to safetensors, once: the only place where a pickle is read, and only its tensors.

``torch.load(weights_only=True)`` builds tensors and plain containers and refuses everything else. What comes
out is a folder of safetensors and JSON; scoring loads nothing but that.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recast_engine.errors import ConfigError, WeightsUnavailable
from recast_engine.rewards import hpsv3, imagereward, openclip
from recast_engine.rewards.clip import OPENAI_CLIP_L
from recast_engine.rewards.settings import weights_folder

LOG = logging.getLogger(__name__)
Weights = Mapping[str, Tensor]
Converter = Callable[[Path, Path, Mapping[str, str]], None]
"""``converter(source, folder, extra)`` writes into the empty ``folder``."""

BERT = "google-bert/bert-base-uncased"
QWEN = "Qwen/Qwen2-VL-7B-Instruct"


def convert(
    reward: str,
    source: Path,
    *,
    target: Path | None = None,
    extra: Mapping[str, str] | None = None,
    replace: bool = False,
) -> Path:
    """Write ``reward``'s published checkpoint ``source`` as safetensors and return the folder.

    Args:
        target: the folder; where the reward looks for it unless given.
        extra: ``tokenizer`` (a folder or a hub repository in the local cache) or ``instruction`` (a text
            file), for the rewards that need one.
        replace: overwrite an earlier conversion.

    Raises:
        ConfigError: nothing to convert for this reward, a source that is no such checkpoint, a pickle that
            holds more than tensors, or a folder that exists.
        WeightsUnavailable: the tokenizer is not in the local cache.
    """
    if reward not in CONVERTERS:
        raise ConfigError(f"{reward!r} needs no conversion; there are {', '.join(sorted(CONVERTERS))}")
    if not source.exists():
        raise ConfigError(f"{source} does not exist")
    folder = target or weights_folder(reward)
    if folder.exists() and not replace:
        raise ConfigError(f"{folder} exists already; ask to replace it, or name another folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        CONVERTERS[reward](source, partial, extra or {})
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint file, unwrapped from ``state_dict`` or ``model``.

    Raises:
        ConfigError: not a checkpoint, or one that holds more than tensors and plain containers.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        data: Any = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise ConfigError(f"{path.name} holds more than tensors: it is not loaded") from None
    except (OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path.name} is no checkpoint ({type(error).__name__})") from None
    for wrapper in ("state_dict", "model"):
        if isinstance(data, Mapping) and isinstance(data.get(wrapper), Mapping):
            data = data[wrapper]
    tensors = {k: v for k, v in data.items() if isinstance(v, Tensor)} if isinstance(data, Mapping) else {}
    if not tensors:
        raise ConfigError(f"{path.name} holds no tensors")
    return {key.removeprefix("module."): tensor for key, tensor in tensors.items()}


def _hpsv2(source: Path, folder: Path, extra: Mapping[str, str]) -> None:
    """ViT-H-14 of open_clip as CLIPModel, with CLIP's tokenizer and image processor."""
    from transformers import CLIPModel

    weights = read_weights(source)
    config = openclip.config_of(weights, openclip.VIT_H_14)
    model = _filled(CLIPModel, config, openclip.to_transformers(weights))
    model.save_pretrained(folder)
    side = config.vision_config.image_size
    _clip_files(extra.get("tokenizer", OPENAI_CLIP_L), side, folder)


def _clip_files(tokenizer: str, side: int, folder: Path) -> None:
    from transformers import CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    _cached(CLIPTokenizer, tokenizer, ("tokenizer.json", "vocab.json")).save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    ).save_pretrained(folder)


def _cached(cls: Any, source: str, files: Sequence[str]) -> Any:
    """A tokenizer or config; transformers makes an empty one where ``files`` are missing, so look first."""
    from huggingface_hub import try_to_load_from_cache

    def there(name: str) -> bool:
        folder = Path(source)
        if folder.is_dir():
            return (folder / name).is_file()
        return isinstance(try_to_load_from_cache(source, name), str)

    try:
        if any(map(there, files)):
            return cls.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError) as error:
        LOG.warning("%s of %s: %s", cls.__name__, source, error)
    raise WeightsUnavailable(f"{files[0]} of {source} is not in the local cache: run hf download {source}")


def _filled(cls: Any, config: Any, weights: Weights) -> Any:
    """A model of ``cls`` with exactly ``weights``, in their precision. Raises ConfigError naming strays."""
    with torch.device("meta"):
        model = cls(config)
    result = model.load_state_dict(dict(weights), strict=False, assign=True)
    computed = {name for name, _ in model.named_buffers()}
    absent = sorted(set(result.missing_keys) - computed)
    if absent or result.unexpected_keys:
        stray = [*absent, *result.unexpected_keys]
        raise ConfigError(f"the checkpoint does not fit {type(model).__name__}: {', '.join(stray[:5])}")
    return model


def _aesthetic(source: Path, folder: Path, extra: Mapping[str, str]) -> None:
    """LAION's linear head, or the layers of its successor, folded into the one linear map that they are."""
    save_file(folded_head(read_weights(source)), folder / "head.safetensors")


def folded_head(weights: Weights) -> dict[str, Tensor]:
    """``weight`` (1, D) and ``bias`` (1,) float32 of a linear layer, or of several with nothing between.

    Raises:
        ConfigError: layers that are not a chain from an embedding to one number.
    """
    layers = sorted({key.rpartition(".")[0] for key in weights}, key=lambda name: (len(name), name))
    weight, bias = torch.eye(0), torch.zeros(0)
    try:
        for number, layer in enumerate(layers):
            prefix = f"{layer}." if layer else ""
            matrix, offset = weights[f"{prefix}weight"].double(), weights[f"{prefix}bias"].double()
            weight, bias = (matrix @ weight, matrix @ bias + offset) if number else (matrix, offset)
    except (KeyError, RuntimeError) as error:
        raise ConfigError(f"the checkpoint is no chain of linear layers: {error}") from None
    if weight.shape[0] != 1 or bias.shape != (1,):
        raise ConfigError(f"the head gives {weight.shape[0]} numbers, not one")
    return {"weight": weight.float(), "bias": bias.float()}


def _imagereward(source: Path, folder: Path, extra: Mapping[str, str]) -> None:
    """BLIP's two towers under transformers' names, the head folded, with BERT's tokenizer."""
    from transformers import BertTokenizer, BlipTextConfig, BlipVisionConfig, BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    weights = read_weights(source)
    configs, renamed = imagereward.configs_of(weights), imagereward.to_transformers(weights)
    vision, text = BlipVisionConfig(**configs["vision"]), BlipTextConfig(**configs["text"])
    _filled(BlipVisionModel, vision, _below(renamed, "vision."))
    _filled(lambda config: BlipTextModel(config, add_pooling_layer=False), text, _below(renamed, "text."))
    head = folded_head(_below(weights, "mlp.layers."))
    save_file(renamed | {f"head.{key}": value for key, value in head.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(configs, indent=2), "utf-8")
    _cached(BertTokenizer, extra.get("tokenizer", BERT), ("tokenizer.json", "vocab.txt")).save_pretrained(
        folder
    )


def _below(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _geneval(source: Path, folder: Path, extra: Mapping[str, str]) -> None:
    """A hub snapshot of Mask2Former that has its weights only as ``pytorch_model.bin``."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

    if not (source / "pytorch_model.bin").is_file():
        raise ConfigError(f"{source} is no snapshot with pytorch_model.bin")
    model, loaded = Mask2FormerForUniversalSegmentation.from_pretrained(
        None,
        config=Mask2FormerConfig.from_pretrained(source, local_files_only=True),
        state_dict=read_weights(source / "pytorch_model.bin"),
        output_loading_info=True,
    )
    if loaded["missing_keys"]:
        raise ConfigError(f"the checkpoint lacks {', '.join(sorted(loaded['missing_keys'])[:5])}")
    model.save_pretrained(folder)
    shutil.copy(source / "preprocessor_config.json", folder)


def _hpsv3(source: Path, folder: Path, extra: Mapping[str, str]) -> None:
    """Qwen2VLModel with the reward head beside it, its tokenizer and the instruction it was trained with."""
    from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLModel

    if "instruction" not in extra:
        raise ConfigError(
            "instruction: give the text that the model was trained with (--instruction FILE): INSTRUCTION "
            "and prompt_with_special_token, one after the other, of the published data collator"
        )
    instruction = hpsv3.check_instruction(Path(extra["instruction"]).read_text("utf-8"))
    base = extra.get("tokenizer", QWEN)
    tokenizer = _cached(Qwen2Tokenizer, base, ("tokenizer.json", "vocab.json"))
    tokenizer.add_special_tokens({"additional_special_tokens": [hpsv3.REWARD_TOKEN]})
    config = _cached(Qwen2VLConfig, base, ("config.json",))
    model_weights, head = hpsv3.to_transformers(read_weights(source))
    words = model_weights.get("language_model.embed_tokens.weight")
    if words is None or len(words) < len(tokenizer):
        raise ConfigError("the checkpoint does not fit the tokenizer: it has fewer words")
    config.text_config.vocab_size = len(words)
    _filled(Qwen2VLModel, config, model_weights).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(head, folder / "head.safetensors")
    (folder / "instruction.txt").write_text(instruction, "utf-8")


CONVERTERS: dict[str, Converter] = {
    "aesthetic": _aesthetic,
    "geneval": _geneval,
    "hpsv2": _hpsv2,
    "hpsv3": _hpsv3,
    "imagereward": _imagereward,
}
