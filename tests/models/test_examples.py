"""Examples for fine-tuning: which tokens count, and batches."""

import json

import numpy as np
import pytest

from models.finetune.examples import Example, batches, read_examples


def examples_of(tokenizer, tmp_path, *records, max_tokens=512):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n\n".join(map(json.dumps, records)))
    return read_examples(path, tokenizer, max_tokens=max_tokens)


def counted(tokenizer, example):
    """The pieces of text whose tokens count, one for each answer."""
    pieces, current = [], []
    for target in [*example.targets, -1]:
        if target >= 0:
            current.append(target)
        elif current:
            assert current[-1] in tokenizer.stop_tokens
            pieces.append(tokenizer.decode(current))
            current = []
    return pieces


def test_answers_count(tokenizer, tmp_path):
    record = {"prompt": "What is two plus two?", "response": "Four.", "system": "Be brief."}
    (((example,),), cut) = examples_of(tokenizer, tmp_path, record)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": record["prompt"]}]
    before = tokenizer.encode_chat(messages)
    answer = [*tokenizer.encode("Four."), *tokenizer.encode("<|im_end|>")]
    assert example.tokens == [*before, *answer][:-1]
    assert example.targets == [-1] * (len(before) - 1) + answer
    assert cut == 0


def test_every_answer_of_a_conversation_counts(tokenizer, tmp_path):
    messages = [
        {"role": "user", "content": "One? <|im_end|>"},  # a text, which ends nothing
        {"role": "assistant", "content": "First."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Second, at last."},
        {"role": "user", "content": "Nobody answers this."},
    ]
    (((example,),), _) = examples_of(tokenizer, tmp_path, {"messages": messages})
    assert counted(tokenizer, example) == ["First.", "Second, at last."]
    whole = tokenizer.encode_chat(messages[:4], add_generation_prompt=False)
    assert [*example.tokens, example.targets[-1]] == whole[:-1]  # up to where the turn ends: no new line


def test_other_keys_change_nothing(tokenizer, tmp_path):
    conversation = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four."}]
    for record, other in (
        ({"text": "The sea is wide."}, {"id": 3, "response": "None."}),
        ({"messages": conversation}, {"prompt": "Two?", "source": None}),
        ({"prompt": "Two?", "response": "Four."}, {"score": [1, 2]}),
    ):
        ((example,), (same,)), _ = examples_of(tokenizer, tmp_path, record, record | other)
        assert example == same
    ((example,), (same,)), _ = examples_of(
        tokenizer, tmp_path, {"prompt": "Two?", "response": "Four."}, {"prompt": "Two?", "completion": "Four."}
    )
    assert example == same


def test_all_of_a_text_counts(tokenizer, tmp_path):
    (((example,),), cut) = examples_of(tokenizer, tmp_path, {"text": "The sea is wide."}, max_tokens=4)
    tokens = tokenizer.encode("The sea is wide.")
    assert len(tokens) > 4
    assert (example.tokens, example.targets, cut) == (tokens[:3], tokens[1:4], 1)


def test_batches():
    rng = np.random.default_rng(0)
    lengths = [3, 31, 32, 33, 60, 65, 90, 97, 130, 200, 7]
    examples = [Example([i] * length, [-1] * (length - 1) + [i]) for i, length in enumerate(lengths)]
    parts = batches(examples, 3, rng)
    assert sorted(batch.tokens.shape for batch in parts) == [(3, 32), (3, 48), (3, 96), (3, 256)]
    seen = []
    for batch in parts:
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            if (index := targets.max()) >= 0:
                seen.append(index)
                length = lengths[index]
                assert tokens.tolist() == [index] * length + [0] * (len(tokens) - length)
                assert targets.tolist() == [-1] * (length - 1) + [index] + [-1] * (len(tokens) - length)
    assert sorted(seen) == list(range(len(lengths)))
    one, same = (batches(examples, 3, np.random.default_rng(5)) for _ in range(2))
    for batch, other in zip(one, same, strict=True):
        np.testing.assert_array_equal(batch.tokens, other.tokens)


@pytest.mark.parametrize("length", [1, 32, 33, 48, 49, 500, 1000, 1537])
def test_padding_is_less_than_a_third(length):
    (batch,) = batches([Example([1] * length, [1] * length)], 1)
    padded = batch.tokens.shape[1]
    assert length <= padded < max(1.5 * length, 33)
