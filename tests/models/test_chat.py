"""Conversations: `python -m models.generate --chat`."""

import contextlib
import io
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys

import pytest

from models.decoding.generator import Generator
from models.generate.__main__ import main
from models.generate.chat import Chat, ConversationFull

from .. import one_device


ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "models.generate", "--chat"]
SAID = ["What is the capital of France?", "And of Italy?", "Which of the two is older? Answer in a few words."]


@pytest.fixture(scope="module")
def generator(model):
    """One for all tests: what a conversation finds in the cache must not change what it says."""
    return Generator(model, room=256)


def nothing(text):
    pass


def test_a_conversation_reads_only_what_is_new(generator, tokenizer):
    chat, read = Chat(generator, tokenizer, max_tokens=30), 0
    for text in SAID:
        written = []
        answer = chat.say(text, written.append)
        assert "".join(written) == answer.text != ""
        prompt = tokenizer.encode_chat([*chat.messages[:-2], {"role": "user", "content": text}])
        speed = generator.speed
        assert speed.kept_tokens + speed.prompt_tokens == len(prompt)
        read += speed.prompt_tokens
        # All tokens but the answers' are read once: each answer is in the cache, but for its last token.
        generated = len(generator.reader.tokens) - read
        assert generated == sum(len(tokenizer.encode(m["content"])) for m in chat.messages if m["role"] == "assistant")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 3


def test_it_says_what_it_would_say_of_the_whole_history(generator, tokenizer):
    chat = Chat(generator, tokenizer, system="You are a guide.", max_tokens=30)
    answers = [chat.say(text, nothing).text for text in SAID]
    for i, text in enumerate(answers):
        generator.reader.tokens.clear()
        anew = Chat(generator, tokenizer, max_tokens=30)
        anew.messages = chat.messages[: 1 + 2 * i]
        assert anew.say(SAID[i], nothing).text == text
        assert generator.speed.kept_tokens == 0


def test_an_answer_that_is_stopped(generator, tokenizer):
    chat, asked = Chat(generator, tokenizer), iter(range(100))
    answer = chat.say("Count from one to a hundred.", nothing, lambda: next(asked) > 5)
    assert answer.finish == "interrupted"
    assert answer.num_tokens == 6
    assert chat.messages[-1] == {"role": "assistant", "content": answer.text}
    before = list(chat.messages)
    assert chat.say("Go on.", nothing, lambda: True).text == ""
    assert chat.messages == before  # nobody said anything


def test_a_full_conversation(generator, tokenizer):
    chat = Chat(generator, tokenizer)
    answer = chat.say("Count from one to a hundred." + " Please." * 90, nothing)
    assert answer.finish == "context"
    assert generator.speed.kept_tokens + generator.speed.prompt_tokens + answer.num_tokens == 256
    before = list(chat.messages)
    with pytest.raises(ConversationFull, match=r"less than 256 tokens; got \d+\. Say /reset, or start with a larger"):
        chat.say("And now?", nothing)
    assert chat.messages == before
    chat.reset()
    with pytest.raises(ConversationFull, match=r"got \d+\. Shorten the message, or start with a larger --context\."):
        chat.say("word " * 256, nothing)
    assert "Paris" in chat.say(SAID[0], nothing).text


def test_a_context_that_is_full_before_the_first_message(capsys):
    """As wide as it was asked for, and not as the cache is."""
    begun = r"expected --context above (\d+) tokens, with which a conversation begins; got 40"
    assert main(["--chat", "--context", "40", "--system", "word " * 40]) == 2
    error = capsys.readouterr().err
    said = re.fullmatch(rf"generate: error: {begun}\. Shorten --system, or give a larger --context\.\n", error)
    assert said is not None
    assert int(said[1]) > 40


def test_lines_of_stdin(monkeypatch, capsys):
    lines = [SAID[0], "", "/reset", "/nonsense now", "And of Italy?", "/quit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert main(["--chat", "--json", "--max-tokens", "20"]) == 0
    written = capsys.readouterr()
    first, second = map(json.loads, written.out.splitlines())
    assert first["text"] == "The capital of France is Paris."
    assert first["kept_tokens"] == 0
    assert "Rome" not in second["text"]  # it has forgotten what the question is about
    assert second["kept_tokens"] > 20  # but the system message is still in the cache
    assert "expected a message, /reset or /quit; got /nonsense" in written.err


def _interrupted(process):
    """Interrupt a program that waits for a line, and return its exit code.

    Python has a moment between the prompt and its wait for keys in which it sees an interrupt only at the next one.
    """
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(10)
    return None


@pytest.mark.usefixtures("interruptible")
def test_interrupts_on_a_terminal():
    controller, terminal = pty.openpty()
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with subprocess.Popen(COMMAND, cwd=ROOT, env={**one_device.environment(), "TERM": "dumb"}, **ends) as process:
        os.close(terminal)

        def until(pattern):
            text = b""
            while not re.search(pattern, text, re.DOTALL):
                assert select.select([controller], [], [], 60)[0], text
                text += os.read(controller, 1)
            return text.decode(errors="replace")

        try:
            until(b"> $")
            os.write(controller, b"Count from one to a hundred.\n")
            until(b"hundred[.].{30}")
            process.send_signal(signal.SIGINT)
            assert "hundred" not in until(b"> $")
            os.write(controller, b"What is the capital of France?\n")
            assert "Paris" in until(b"> $")
            assert _interrupted(process) == 130  # with no answer to stop, it ends the program
        finally:
            process.kill()
            os.close(controller)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--chat"], "expected one of a prompt, --prompt-file, --chat and --prompts; got a prompt and --chat"),
        (["hi", "--context", "100"], "expected --context with --chat; got it without"),
        (["--chat", "--context", "0"], "expected --context of 1 or more; got 0"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"generate: error: {message}\n"
