from __future__ import annotations

import hashlib
import io
import json
import zipfile

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load

from api.adapters import formats

FORMATS = ("diffusers", "peft", "comfyui")


@pytest.fixture
def url(adapter):
    return f"/v1/adapters/{adapter}/download"


def test_metadata(client, adapter):
    view = client.get(f"/v1/adapters/{adapter}").json()
    content = client.get(f"/v1/adapters/{adapter}/download").content
    assert view["sha256"] == hashlib.sha256(content).hexdigest()
    assert view["bytes"] == len(content)
    assert (view["base_model"], view["rank"], view["alpha"], view["step"], view["epoch"]) == (
        "miniature", 2, 4.0, 8, 2,
    )  # fmt: skip
    assert (view["final"], view["provenance"]) == (True, {"seed": 7})
    assert client.get("/v1/adapters").json()["data"] == [view]
    assert client.get(f"/v1/trainings/{view['training']}/adapters").json()["data"] == [view]


@pytest.mark.parametrize("form", FORMATS)
def test_a_download_is_whole_named_and_conditional(client, url, form):
    answer = client.get(url, params={"format": form})
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-disposition"].startswith('attachment; filename="')
    etag = answer.headers["etag"]
    assert etag.startswith('"')
    assert client.get(url, params={"format": form}).content == answer.content
    for condition in (etag, f'"other", {etag}', "*"):
        again = client.get(url, params={"format": form}, headers={"If-None-Match": condition})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert client.get(url, params={"format": form}, headers={"If-None-Match": '"x"'}).status_code == 200


def test_etags_of_formats_differ(client, url):
    etags = {client.get(url, params={"format": form}).headers["etag"] for form in FORMATS}
    assert len(etags) == 3


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ("bytes=0-9", slice(0, 10)),
        ("bytes=10-", slice(10, None)),
        ("bytes=-7", slice(-7, None)),
        ("bytes=5-5", slice(5, 6)),
        ("bytes=3-999999999", slice(3, None)),
        ("bytes=-999999999", slice(None)),
    ],
)
def test_a_range_is_that_part(client, url, form, wanted, part):
    whole = client.get(url, params={"format": form})
    answer = client.get(url, params={"format": form}, headers={"Range": wanted})
    expected = whole.content[part]
    start = whole.content.index(expected) if part.start != -7 else len(whole.content) - 7
    assert (answer.status_code, answer.content) == (206, expected)
    assert int(answer.headers["content-length"]) == len(expected)
    size = len(whole.content)
    first = part.indices(size)[0]
    assert answer.headers["content-range"] == f"bytes {first}-{first + len(expected) - 1}/{size}"
    assert start >= 0


def test_ranges_that_cannot_be_served(client, url):
    size = len(client.get(url).content)
    for wanted in (f"bytes={size}-", "bytes=-0", "bytes=999999999-9999999999"):
        answer = client.get(url, headers={"Range": wanted})
        assert answer.status_code == 416
        assert answer.headers["content-range"] == f"bytes */{size}"
        assert answer.headers["content-type"] == "application/problem+json"
    for ignored in (
        "bytes=9-2",
        "bytes=-",
        "bytes=a-b",
        "lines=0-1",
        "bytes=0-1,3-4",
        "bytes=" + "9" * 400 + "-",
    ):
        answer = client.get(url, headers={"Range": ignored})
        assert (answer.status_code, len(answer.content)) == (200, size)


def test_a_range_of_another_version_is_the_whole_file(client, url):
    whole = client.get(url)
    headers = {"Range": "bytes=0-3", "If-Range": whole.headers["etag"]}
    assert client.get(url, headers=headers).status_code == 206
    assert client.get(url, headers=headers | {"If-Range": '"old"'}).content == whole.content


def test_peft_zip_holds_config_and_the_same_tensors(client, url):
    original = load(client.get(url).content)
    archive = zipfile.ZipFile(io.BytesIO(client.get(url, params={"format": "peft"}).content))
    assert archive.testzip() is None
    config = json.loads(archive.read("adapter_config.json"))
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 4.0, "LORA")
    assert config["target_modules"] == ["blocks.0.to_out.0", "blocks.0.to_q"]
    assert config["base_model_name_or_path"] == "miniature"
    tensors = load(archive.read("adapter_model.safetensors"))
    assert set(tensors) == {f"base_model.model.{name.removeprefix('transformer.')}" for name in original}
    for name, value in original.items():
        renamed = f"base_model.model.{name.removeprefix('transformer.')}"
        np.testing.assert_array_equal(tensors[renamed], value)


def test_peft_loads_it_at_full_strength(client, url, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    content = client.get(url, params={"format": "peft"}).content
    zipfile.ZipFile(io.BytesIO(content)).extractall(tmp_path)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.to_q = torch.nn.Linear(6, 5, bias=False)
            self.to_out = torch.nn.ModuleList([torch.nn.Linear(6, 5, bias=False)])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block()])

        def forward(self, x):
            return self.blocks[0].to_q(x)

    model = Model()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    base = model(x).detach()
    tuned = peft.PeftModel.from_pretrained(model, str(tmp_path))(x).detach()
    lora = {name: torch.from_numpy(value) for name, value in load(client.get(url).content).items()}
    down, up = (lora[f"transformer.blocks.0.to_q.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(tuned - base, 4.0 / 2 * x @ down.T @ up.T)  # alpha / rank = 2


def test_comfyui_has_its_names_alpha_and_the_provenance(client, url, tmp_path):
    original = load(client.get(url).content)
    path = tmp_path / "comfyui.safetensors"
    path.write_bytes(client.get(url, params={"format": "comfyui"}).content)
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"recast.seed": "7"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for module in ("blocks.0.to_q", "blocks.0.to_out.0"):
        key = f"transformer.{module}"
        np.testing.assert_array_equal(
            tensors.pop(f"{key}.lora_down.weight"), original[f"{key}.lora_A.weight"]
        )
        np.testing.assert_array_equal(tensors.pop(f"{key}.lora_up.weight"), original[f"{key}.lora_B.weight"])
        assert tensors.pop(f"{key}.alpha") == np.float32(4.0)
    assert tensors == {}


def test_a_file_that_is_gone_is_said_so_without_a_path(service, adapter, settings):
    (path,) = settings.home.glob("artifacts/**/final.safetensors")
    path.unlink()
    for form in FORMATS:
        answer = service.client.get(f"/v1/adapters/{adapter}/download", params={"format": form})
        assert answer.status_code == 404
        assert str(settings.home) not in answer.text


def test_conversion_does_not_depend_on_chunks_or_dtype():
    header = {
        "__metadata__": {},
        "transformer.a.lora_A.weight": {"dtype": "BF16", "shape": [1, 1], "data_offsets": [0, 2]},
    }
    header["transformer.a.lora_B.weight"] = {"dtype": "BF16", "shape": [1, 1], "data_offsets": [2, 4]}
    raw = json.dumps(header).encode()
    source = io.BytesIO(len(raw).to_bytes(8, "little") + raw + b"\x01\x02\x03\x04")
    file, size = formats.to_comfyui(source, formats.Shape("m", 1, 8.0))
    content = file.read()
    assert size == len(content)
    assert content.endswith(np.float32(8.0).tobytes() + b"\x01\x02\x03\x04")
