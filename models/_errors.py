"""The error of files that the programs cannot use."""


class ModelFileError(Exception):
    """A model's file that cannot be used. The message is one line, whatever it quotes."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))
