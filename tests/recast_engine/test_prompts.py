import pickle

import pytest

from recast_engine.prompts import (
    Prompt,
    PromptSetError,
    dump_prompts,
    parse_prompts,
    prompt_set_hash,
    quoted_spans,
)

POSITION = (
    '{"tag": "position", "include": [{"class": "teddy bear", "count": 1}, '
    '{"class": "dog", "count": 1, "position": ["right of", 0]}], "prompt": "a dog right of a teddy bear"}'
)


def test_plain_lines_and_json_lines_mix_and_blank_lines_are_skipped():
    prompts = parse_prompts(f'a cat\n\n{POSITION}\n  the word "UP"  \n')
    assert [prompt.prompt for prompt in prompts] == ["a cat", "a dog right of a teddy bear", 'the word "UP"']
    assert prompts[1].include[1] == {"class": "dog", "count": 1, "position": ["right of", 0]}
    assert prompts[1].has("include")
    assert not prompts[1].has("text")


def test_dump_is_inverted_by_parse_and_hash_ignores_formatting():
    prompts = parse_prompts(POSITION + '\n{"prompt": "sign", "text": "GO"}')
    assert parse_prompts(dump_prompts(prompts)) == prompts
    respaced = parse_prompts(POSITION.replace(": ", ":  ") + '\n\n{"text": "GO", "prompt": "sign"}\n')
    assert prompt_set_hash(respaced) == prompt_set_hash(prompts)
    assert prompt_set_hash(prompts[:1]) != prompt_set_hash(prompts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": "x", "text": "  "}', "blank"),
        ('{"prompt": "x", "colour": "red"}', "colour"),
        ('{"prompt": "x", "include": [{"class": "a", "count": 0}]}', "include.0.count"),
        ('{"prompt": "x", "include": [{"class": "a", "count": 1, "position": ["above", 3]}]}', "position"),
        ('{"prompt": "x", "include": [{"class": "a", "count": 1, "position": ["above", 0]}]}', "before it"),
        (
            '{"prompt": "x", "include": [{"class": "a", "count": 1, "position": ["above", 1]}, '
            '{"class": "b", "count": 1}]}',
            "before it",
        ),
        (
            '{"prompt": "x", "include": [{"class": "a", "count": 1}, '
            '{"class": "b", "count": 1, "position": ["inside", 0]}]}',
            "include.1.position.0: Input should be 'left of', 'right of', 'above' or 'below'",
        ),
        ('{"text": "GO"}', "prompt"),
        ('{"prompt": "x", "prompt": "y"}', "'prompt' is given twice"),
        ('{"prompt": "x", "include": [{"class": "a", "count": 1, "count": 2}]}', "'count' is given twice"),
        ("{" * 5000, "not valid JSON"),
        ("x" * 5000, "prompt"),
    ],
)
def test_a_malformed_line_is_named(line, message):
    with pytest.raises(PromptSetError) as caught:
        parse_prompts(f"fine\n{line}\nfine too")
    ((number, text),) = caught.value.problems
    assert number == 2
    assert message in text


def test_every_malformed_line_is_listed_and_the_error_survives_pickling():
    with pytest.raises(PromptSetError) as caught:
        parse_prompts('{\nfine\n{"prompt": 3}')
    assert [number for number, _ in caught.value.problems] == [1, 3]
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems  # noqa: S301


def test_an_empty_set_is_refused():
    with pytest.raises(PromptSetError, match="no prompts"):
        parse_prompts("\n \n")


def test_prompt_equality_is_by_value():
    clause = {"class": "x", "count": 1}
    assert Prompt("a", include=(clause,)) == Prompt("a", include=(dict(clause),))


@pytest.mark.parametrize(
    ("prompt", "spans"),
    [
        ('a sign that says "Hello World"', ["Hello World"]),
        ("a sign that says 'Hello World'.", ["Hello World"]),
        (
            "a poster, “Grand Opening”, and „Willkommen“ and «Bonjour»",
            ["Grand Opening", "Willkommen", "Bonjour"],
        ),
        ("a banner with ‘Joe’s Café’", ["Joe’s Café"]),
        ("a label 'Queen Anne's Revenge' on a ship", ["Queen Anne's Revenge"]),
        ('a knight\'s castle, its sign "Trespassers Will Be Jousted"', ["Trespassers Will Be Jousted"]),
        ('"STOP" beside "GO"', ["STOP", "GO"]),
        ("a '90s diner with the dogs' bowls", []),
        ("rock 'n' roll", ["n"]),
        ('nothing between "" or " "', []),
        ("看板に「営業中」", ["営業中"]),
        ('an open " quote', []),
        ('a 12" record and a 7" single', []),  # inches
        ('a 12" pizza box that says "HOT"', ["HOT"]),
        ('"Route 66" beside "Exit 7"', ["Route 66", "Exit 7"]),
        ("ein Schild »Hallo« und »Welt«", ["Hallo", "Welt"]),
        ("une affiche «Salut» et «Paris»", ["Salut", "Paris"]),
        ("en skylt ”Hej” och ”Stopp”", ["Hej", "Stopp"]),
        ('a sign “STOP" and „GEH", then “GO”', ["STOP", "GEH", "GO"]),  # closed by a straight mark
        ("看板に『本日』", ["本日"]),
        ('写着"你好"的招牌', ["你好"]),
    ],
)
def test_quoted_spans_are_found_and_apostrophes_are_not(prompt, spans):
    assert quoted_spans(prompt) == spans
    assert Prompt(prompt).target == (spans[0] if spans else None)
    assert Prompt(prompt).has("text") == bool(spans)


def test_text_metadata_comes_before_quoted_spans():
    assert Prompt('a sign "STOP"', text="GO").target == "GO"
    assert "text" not in Prompt('a sign "STOP"').to_json()  # the set's hash does not depend on the reading
