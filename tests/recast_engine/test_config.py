import json

import pytest
from pydantic import ValidationError

from recast_engine.config import EvaluationConfig, ProfileConfig, StageAllocation, TrainingConfig, dump, load

TRAINING = {
    "model": "miniature",
    "prompt_set": "pset_x",
    "stages": [
        {"budgets": {"clipscore": 1.0, "ocr": 3.0}, "epochs": 2},
        {"budgets": {"geneval": 1}, "epochs": 1, "allocation": "alloc_x"},
    ],
}


def test_reference_settings_are_the_defaults():
    config = load(TrainingConfig, TRAINING)
    assert (config.lora.rank, config.lora.alpha) == (32, 64.0)
    assert (config.sampling.steps, config.sampling.images_per_prompt, config.sampling.prompts_per_epoch) == (
        25,
        24,
        48,
    )
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.beta, optimizer.kl_weight, optimizer.advantage_clip) == (
        3e-4,
        0.1,
        1e-4,
        5.0,
    )
    assert config.stages[0].allocation == StageAllocation()
    assert config.stages[1].allocation == "alloc_x"


def test_dump_and_load_are_inverse_through_json():
    config = load(TrainingConfig, TRAINING)
    assert load(TrainingConfig, json.loads(json.dumps(dump(config)))) == config


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"stages": []}, "stages"),
        ({"stages": [{"budgets": {"ocr": -1.0}, "epochs": 1}]}, "budgets"),
        ({"stages": [{"budgets": {"ocr": float("nan")}, "epochs": 1}]}, "budgets"),
        ({"stages": [{"budgets": {"ocr": float("inf")}, "epochs": 1}]}, "budgets"),
        ({"stages": [{"budgets": {"ocr": 1.0}, "epochs": 0}]}, "epochs"),
        ({"sampling": {"steps": 0}}, "steps"),
        ({"sampling": {"steps": 1001}}, "steps"),
        ({"optimizer": {"learning_rate": 0.0}}, "learning_rate"),
        ({"lora": {"rank": 0}}, "rank"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_fields_are_named(change, where):
    with pytest.raises(ValidationError) as caught:
        load(TrainingConfig, TRAINING | change)
    assert any(where in ".".join(map(str, error["loc"])) for error in caught.value.errors())


def test_every_bad_field_is_reported_at_once():
    with pytest.raises(ValidationError) as caught:
        load(ProfileConfig, {"model": 3, "rewards": [], "prompt_set": None, "estimator": {"levels": 1}})
    assert {str(error["loc"][0]) for error in caught.value.errors()} == {
        "model",
        "rewards",
        "prompt_set",
        "estimator",
    }


def evaluation(**change):
    base = {
        "subjects": [{"label": "base", "base_model": "miniature"}, {"label": "new", "adapter": "adapt_x"}],
        "baseline": "base",
        "rewards": ["ocr"],
        "prompt_set": "pset_x",
    }
    return base | change


def test_an_evaluation_needs_a_baseline_among_distinct_labels():
    assert load(EvaluationConfig, evaluation()).steps == 40
    with pytest.raises(ValidationError, match="baseline 'other' is not the label"):
        load(EvaluationConfig, evaluation(baseline="other"))
    with pytest.raises(ValidationError, match="labels of subjects must differ"):
        load(EvaluationConfig, evaluation(subjects=[{"label": "base", "base_model": "miniature"}] * 2))
    with pytest.raises(ValidationError, match="exactly one of adapter and base_model"):
        load(EvaluationConfig, evaluation(subjects=[{"label": "base"}]))
    with pytest.raises(ValidationError, match="seeds must differ"):
        load(EvaluationConfig, evaluation(seeds=[0, 1, 0]))
