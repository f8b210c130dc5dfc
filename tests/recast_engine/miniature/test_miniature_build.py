"""Pretraining: interrupted and continued equals uninterrupted, bit for bit."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from torch import nn

from recast_engine.miniature import flow as flows
from recast_engine.miniature import vae
from recast_engine.miniature.checkpoint import Trainee, warm_then_decay, write_json

TOY = flows.FlowBudget(steps=6, batch=4, images=64, warmup=2, save_every=3)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    [file] = folder.glob("step-*.safetensors")
    return load_file(file)


def assert_same(first: Path, second: Path) -> None:
    a, b = tensors(first), tensors(second)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_continued_flow_training_equals_uninterrupted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    autoencoder = vae.create().eval()
    autoencoder.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    whole = flows.train(autoencoder, tmp_path / "whole", TOY)
    flows.train(autoencoder, tmp_path / "parts", TOY, stop_at=3)
    continued = flows.train(autoencoder, tmp_path / "parts", TOY)
    assert_same(tmp_path / "whole", tmp_path / "parts")
    loaded = flows.load_averaged(tmp_path / "whole", TOY)
    for name, module in whole.modules.items():
        for key, value in module.state_dict().items():
            assert torch.equal(value, continued.modules[name].state_dict()[key])
            assert torch.equal(value, loaded.modules[name].state_dict()[key])


def test_continued_autoencoder_training_equals_uninterrupted(tmp_path: Path) -> None:
    def run(folder: Path, total: int, save_every: int) -> AutoencoderKL:
        return vae.train(folder, total, images=32, save_every=save_every)

    class Interrupted(Exception):
        pass

    whole = run(tmp_path / "whole", total=4, save_every=4)
    saved = Trainee.save

    def save_and_stop(self: Trainee, folder: Path) -> None:
        saved(self, folder)
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainee, "save", save_and_stop)
        with pytest.raises(Interrupted):
            run(tmp_path / "parts", total=4, save_every=2)
    continued = run(tmp_path / "parts", total=4, save_every=2)
    assert_same(tmp_path / "whole", tmp_path / "parts")
    assert whole.config.scaling_factor == continued.config.scaling_factor


def test_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no flow checkpoint"):
        flows.load_averaged(tmp_path, TOY)


def test_an_interrupted_save_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    module = nn.Linear(2, 1)
    trainee = Trainee({"m": module}, torch.optim.AdamW(module.parameters()))
    trainee.apply(module(torch.ones(1, 2)).sum(), rate=0.1)
    trainee.save(tmp_path)
    kept = module.weight.detach().clone()
    (tmp_path / "step-0000002.safetensors").write_bytes(b"half a file")
    trainee.apply(module(torch.ones(1, 2)).sum(), rate=0.1)
    assert not torch.equal(module.weight, kept)
    assert trainee.restore(tmp_path)
    assert torch.equal(module.weight, kept)
    assert trainee.step == 1


def test_average_follows_its_definition() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    trainee = Trainee({"m": module}, torch.optim.SGD(module.parameters()), decay=0.999)
    trainee.apply(module(torch.ones(1, 1)).sum(), rate=0.5, clip=100.0)
    # Weight 1 - 0.5 = 0.5; the decay warms up from (1 + n) / (20 + n) = 2/21 at n = 1.
    assert module.weight.item() == pytest.approx(0.5)
    assert trainee.averaged("m")["weight"].item() == pytest.approx(2 / 21 * 1.0 + 19 / 21 * 0.5)


def test_learning_rate_rises_holds_and_falls() -> None:
    rates = [warm_then_decay(step, 100, 1.0, warmup=10, hold=0.6) for step in (0, 9, 30, 60, 80, 99)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 1.0, 0.5, 0.025])


def test_json_is_written_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert (tmp_path / "a" / "b.json").read_text() == '{\n  "x": 1\n}\n'
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.json"]
