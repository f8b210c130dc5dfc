from __future__ import annotations

import json

import pytest

from api.prompt_sets.service import insert_builtin
from recast_engine import miniature
from recast_engine.config import MAX_PROMPTS
from recast_engine.prompts import parse_prompts, prompt_set_hash
from store.models import PromptSet

LINES = '{"prompt": "the word \\"CAT\\"", "text": "CAT", "tag": "text"}\na red circle\n'


def test_counts_by_tag_and_what_each_reward_can_use(client, prompt_set):
    view = client.get(f"/v1/prompt-sets/{prompt_set}").json()
    assert (view["name"], view["count"], view["builtin"]) == ("four", 4, False)
    assert view["tags"] == {"shape": 2, "text": 1, "untagged": 1}
    assert view["usable"] == {
        "clipscore": 4, "hpsv2": 4, "pickscore": 4, "geneval": 2, "ocr": 1, "jpeg_size": 4,
        "aesthetic": 4, "imagereward": 4, "hpsv3": 4, "unifiedreward": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/jsonl", "application/x-ndjson; charset=utf-8"]
)
def test_raw_text(client, media_type):
    headers = {"Content-Type": media_type}
    answer = client.post("/v1/prompt-sets?name=words", content=LINES.encode(), headers=headers)
    assert answer.status_code == 201
    assert (answer.json()["name"], answer.json()["count"]) == ("words", 2)
    assert answer.json()["sha256"] == prompt_set_hash(parse_prompts(LINES))
    content = client.get(f"/v1/prompt-sets/{answer.json()['id']}/content")
    assert parse_prompts(content.text) == parse_prompts(LINES)


def test_a_multipart_file(client):
    answer = client.post("/v1/prompt-sets", files={"file": ("words.jsonl", LINES)}, data={"name": "words"})
    assert (answer.status_code, answer.json()["name"], answer.json()["count"]) == (201, "words", 2)
    unnamed = client.post("/v1/prompt-sets", files={"file": ("words.jsonl", LINES)})
    assert unnamed.json()["name"] == "words.jsonl"


@pytest.mark.parametrize(
    ("media_type", "content"),
    [
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b"nonsense"),
        (
            "multipart/form-data; boundary=x",
            2 * b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\na\r\n'
            + b"--x--\r\n",
        ),
    ],
)
def test_a_form_that_cannot_be_read_is_an_invalid_request(client, media_type, content):
    answer = client.post("/v1/prompt-sets", content=content, headers={"Content-Type": media_type})
    assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, ["body"])
    assert "form cannot be read" in answer.json()["detail"]


def test_byte_order_mark_and_windows_lines(client):
    content = "\ufeffa red circle\r\n\r\nzwölf Kätzchen 猫\r\n".encode()
    answer = client.post("/v1/prompt-sets", content=content, headers={"Content-Type": "text/plain"})
    text = client.get(f"/v1/prompt-sets/{answer.json()['id']}/content").text
    assert [prompt.prompt for prompt in parse_prompts(text)] == ["a red circle", "zwölf Kätzchen 猫"]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ('a red circle\n{"prompt": \n', [2]),
        ('{"prompt": "a", "nonsense": 1}\na\n{"prompt": ""}\n', [1, 3]),
        ('{"prompt": "a", "include": [{"class": "circle", "count": 0}]}\n', [1]),
        ('{"prompt": "a", "include": [{"class": "circle", "count": 1, "position": ["above", 4]}]}\n', [1]),
        ('a\n{"prompt": "a\\u0000b"}\n', [2]),
        ('a\n{"prompt": "\\ud800"}\n', [2]),
        ("a\nb\x00c\n", [2]),
        ('a\n{"prompt": 1' + "0" * 5000 + "}\n", [2]),
        ("a\n{" + '"a":[' * 20_000 + "\n", [2]),
        ("a\n" + "x" * 5000 + "\n", [2]),
        ("", [1]),
        ("\n  \n", [1]),
    ],
)
def test_malformed_lines_are_named(client, content, lines):
    answers = [
        client.post("/v1/prompt-sets", content=content.encode(), headers={"Content-Type": "text/plain"}),
        client.post("/v1/prompt-sets", files={"file": ("x", content.encode())}),
    ]
    if content and "\x00" not in content:
        answers.append(client.post("/v1/prompt-sets", json={"name": "x", "content": content}))
    for answer in answers:
        assert answer.status_code == 422, answer.text
        assert [error["loc"] for error in answer.json()["errors"]] == [["body", "line", n] for n in lines]
    assert all(row["builtin"] for row in client.get("/v1/prompt-sets").json()["data"])


def test_bytes_that_are_not_text_are_named(client):
    headers = {"Content-Type": "text/plain"}
    answer = client.post("/v1/prompt-sets", content=b"a\nb\n\xff\n", headers=headers)
    assert answer.json()["errors"] == [{"loc": ["body", "line", 3], "msg": "is not UTF-8 text"}]


@pytest.mark.parametrize(
    "request_",
    [
        {"files": {"other": ("x", "a\n")}},
        {"data": {"name": "x"}, "files": {"file2": ("x", "a\n")}},
        {"content": b"nonsense", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        {"content": b"x", "headers": {"Content-Type": "multipart/form-data"}},
        {"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=x; charset=nonsense"}},
        {
            "content": b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\n\xff\r\n--x--\r\n',
            "headers": {"Content-Type": "multipart/form-data; boundary=x; charset=nonsense"},
        },
        {"content": b"a", "headers": {"Content-Type": "application/octet-stream"}},
        {"content": b"a", "headers": {"Content-Type": "text/plain"}, "params": {"name": ""}},
        {"content": b"a", "headers": {"Content-Type": "text/plain"}, "params": {"name": "x" * 121}},
        {"json": {"name": "x", "content": "a\n", "nonsense": 1}},
        {"json": {"name": 3, "content": "a\n"}},
    ],
)
def test_malformed_uploads_are_refused(client, request_):
    answer = client.post("/v1/prompt-sets", **request_)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_limits(client, settings):
    headers = {"Content-Type": "text/plain"}
    many = b"a\n" * (MAX_PROMPTS + 1)
    assert client.post("/v1/prompt-sets", content=many, headers=headers).status_code == 413
    big = b"a\n" * (settings.max_upload_bytes // 2 + 1)
    assert client.post("/v1/prompt-sets", content=big, headers=headers).status_code == 413
    more_than_a_request = json.dumps({"prompt": "x" * 1000}) + "\n"
    content = (more_than_a_request * (settings.max_body_bytes // 1000 + 10)).encode()
    assert client.post("/v1/prompt-sets", content=content, headers=headers).status_code == 201


def test_built_in_sets_are_listed_beside_uploaded_ones(service, prompt_set):
    listed = service.client.get("/v1/prompt-sets").json()["data"]
    assert listed[0]["id"] == prompt_set
    assert {row["id"] for row in listed if row["builtin"]} == {
        "pset_miniature_train",
        "pset_miniature_heldout",
    }
    theirs = service.client.get("/v1/prompt-sets", headers=service.as_role("stranger")).json()["data"]
    assert {row["id"] for row in theirs} == {"pset_miniature_train", "pset_miniature_heldout"}
    prompts = parse_prompts(miniature.prompt_file("heldout").read_text(encoding="utf-8"))
    heldout = service.client.get("/v1/prompt-sets/pset_miniature_heldout").json()
    assert (heldout["count"], heldout["sha256"]) == (len(prompts), prompt_set_hash(prompts))


def test_a_new_version_brings_built_in_sets_up_to_date(service):
    with service.write() as session, session.begin():
        session.get(PromptSet, "pset_miniature_train").sha256 = "old"
    insert_builtin(service.context)
    prompts = parse_prompts(miniature.prompt_file("train").read_text(encoding="utf-8"))
    view = service.client.get("/v1/prompt-sets/pset_miniature_train").json()
    assert view["sha256"] == prompt_set_hash(prompts)
