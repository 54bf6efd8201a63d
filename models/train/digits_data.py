"""scikit-learn's digits as a ViT reads them: 1,797 images of 8 x 8 pixels, each as 16 patches of 2 x 2."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


PATCHES, PATCH_SIZE, CLASSES = 16, 4, 10

Images = tuple[Float[np.ndarray, "batch patches numbers"], Int[np.ndarray, " batch"]]


class Digits:
    """The images and their batches, which the seed and the step's number draw. A fifth of them, 360, is held out."""

    def __init__(self, *, batch: int, seed: int):
        images, labels = load_digits(return_X_y=True)
        patches = np.asarray(images).reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, PATCHES, PATCH_SIZE)
        parts: Any = train_test_split(
            np.asarray(patches / 8 - 1, np.float32),
            np.asarray(labels, np.int32),
            test_size=0.2,
            random_state=0,
            stratify=labels,
        )
        self._x, self._held_out_x, self._y, self._held_out_y = parts
        self._batch, self._seed = batch, seed

    def batch(self, step: int) -> Images:
        """Return the images of a step."""
        rows = np.random.default_rng((self._seed, step)).integers(0, len(self._y), self._batch)
        return self._x[rows], self._y[rows]

    def held_out(self) -> list[Images]:
        """Return the batches that no step sees."""
        return [(self._held_out_x, self._held_out_y)]
