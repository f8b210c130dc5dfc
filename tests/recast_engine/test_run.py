import numpy as np
import pytest

from recast_engine import config as configs
from recast_engine.errors import ConfigError
from recast_engine.observer import NullObserver
from recast_engine.prompts import dump_prompts, parse_prompts, prompt_set_hash
from recast_engine.run import Request, run


@pytest.fixture
def request_on_disk(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('a red circle\n{"prompt": "the word", "text": "GO"}\n', encoding="utf-8")
    return Request(
        "profile", {"prompt_set_sha256": None}, path, adapters={"adapt_a": tmp_path / "a.safetensors"}
    )


def test_a_request_survives_saving_and_loading(request_on_disk, tmp_path):
    request_on_disk.save(tmp_path / "request.json")
    assert Request.load(tmp_path / "request.json") == request_on_disk


def test_prompts_are_held_to_the_recorded_hash(request_on_disk, tmp_path):
    prompts = request_on_disk.read_prompts()
    digest = prompt_set_hash(prompts)
    same = Request("profile", {"prompt_set_sha256": digest}, request_on_disk.prompts)
    assert same.read_prompts() == prompts
    other = tmp_path / "other.jsonl"
    other.write_text(dump_prompts(parse_prompts("a blue square")), encoding="utf-8")
    with pytest.raises(ConfigError, match="not what it was"):
        Request("profile", {"prompt_set_sha256": digest}, other).read_prompts()


def test_an_adapter_that_was_not_provided_is_named(request_on_disk, tmp_path):
    assert request_on_disk.adapter(None) is None
    assert request_on_disk.adapter("adapt_a") == tmp_path / "a.safetensors"
    with pytest.raises(ConfigError, match="adapt_b"):
        request_on_disk.adapter("adapt_b")


def test_unknown_kinds_and_bad_configs_are_refused(request_on_disk, tmp_path):
    with pytest.raises(ConfigError, match="unknown kind of job 'dream'"):
        run(Request("dream", {}, request_on_disk.prompts), tmp_path, NullObserver())
    evaluation = configs.EvaluationConfig(
        subjects=(configs.Subject("base", base_model="miniature"),),
        baseline="base",
        rewards=("clipscore",),
        prompt_set="pset_x",
    )
    with pytest.raises(ConfigError, match="model: name the base model"):
        run(
            Request("evaluation", configs.dump(evaluation), request_on_disk.prompts), tmp_path, NullObserver()
        )


def test_scores_that_failed_are_told_at_the_end_of_a_job(monkeypatch):
    from types import SimpleNamespace

    from recast_engine import run as module
    from recast_engine.rewards.scoring import Scorer

    class Flaky:
        id = "jpeg_size"

        def score(self, images, prompts):
            return np.where(np.arange(len(images)) == 0, np.nan, 1.0)

    class Listener(NullObserver):
        def finding(self, kind, payload):
            self.heard = (kind, payload["text"])

    devices = []

    def load(rewards, world, device):
        devices.append(device)
        return Scorer([Flaky()])

    monkeypatch.setattr(module, "load_scorer", load)
    monkeypatch.setenv("RECAST_REWARD_DEVICE", "cuda:7")
    backbone, observer = SimpleNamespace(device="cpu"), Listener()
    with module._scoring(["jpeg_size"], "miniature", backbone, observer) as scorer:
        scorer(np.zeros((8, 4, 4, 3), np.uint8), parse_prompts("x\n" * 8))
    assert observer.heard == (
        "warning", "jpeg_size: 1 of 8 scores failed and were left out: no finite score",
    )  # fmt: skip
    assert devices == ["cuda:7"]
