"""Chat templates: conversations as the texts that a model was trained on."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from jinja2 import ext, nodes, parser

from .._errors import ModelFileError


class ChatTemplate:
    """A template in Jinja's language, rendered as Hugging Face's transformers does, for which such templates are written.

    **Arguments:**

    - `template`: its text, or an empty one for none.
    - `name`: where the model's files have it, for errors.
    - `tokens`: the texts that it may use by name, such as `bos_token`.

    **Raises:**

    - `ModelFileError` if it is not a template.
    """

    def __init__(self, template: str, name: str, tokens: Mapping[str, str]):
        self._name, self._tokens = name, tokens
        self._template = _compile(template, name) if template else None

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, up to where the model answers.

        **Arguments:**

        - `messages`: each with a `role` (`"system"`, `"user"` or `"assistant"`) and a `content`.
        - `add_generation_prompt`: whether the beginning of an answer follows.

        **Raises:**

        - `ModelFileError` if there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise ModelFileError(f"expected the model to have {self._name}; got none. Use an instruct model.")
        options: dict[str, Any] = {"tools": None, "documents": None, **self._tokens}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **options)
        except ModelFileError:
            raise
        except Exception as error:  # a template is a program, and may fail like any
            raise ModelFileError(
                f"expected messages that the model's chat template takes; it failed: {error}"
            ) from None


class _Generation(ext.Extension):
    """Renders what is between `{% generation %}` and `{% endgeneration %}`, by which transformers finds answers, as it is."""

    tags = frozenset(["generation"])  # pyright: ignore[reportAssignmentType] it is only read

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        # A scope, as with transformers: what is set inside is not set after it.
        return nodes.Scope(list(parser.parse_statements(("name:endgeneration",), drop_needle=True)), lineno=line)


def _compile(template: str, name: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    # Jinja's own writes "<" so that it may stand in a web page.
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelFileError(
            f"expected {name} to be a template; got {error}. The file is corrupt: get it again."
        ) from None


def _refuse(message: str) -> NoReturn:
    raise ModelFileError(f"expected messages that the model's chat template takes; it says: {message}")


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
