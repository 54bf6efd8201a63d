"""The GPT and the ViT of `models/transformer.py` in PyTorch, with the same parameters, and a step of their training."""

from collections.abc import Callable
from typing import Any

import jax

from models.transformer import GPT, ViT

from . import shapes
from ._contestants import to_torch, torch


def gpt(model: shapes.Model, of: GPT) -> tuple[Any, Callable[..., Any]]:
    functional = torch().nn.functional
    parameters = _parameters(of)

    def loss(parameters: Any, tokens: Any) -> Any:
        read = tokens[:, :-1]
        x = functional.embedding(read, parameters.embedding.weight) + parameters.positions.weight[: read.shape[1]]
        for block in parameters.blocks:
            x = _block(functional, model, block, x)
        logits = functional.linear(_norm(functional, parameters.norm, x), parameters.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten().long())

    return parameters, loss


def vit(model: shapes.Model, of: ViT) -> tuple[Any, Callable[..., Any]]:
    functional, join = torch().nn.functional, torch().cat  # a compiled function cannot import a module
    parameters = _parameters(of)

    def loss(parameters: Any, images: Any) -> Any:
        patches, labels = images
        x = _linear(functional, parameters.patches, patches)
        first = parameters.first.expand(x.shape[0], 1, -1)
        x = join([first, x], dim=1) + parameters.positions
        for block in parameters.blocks:
            x = _block(functional, model, block, x)
        logits = _linear(functional, parameters.head, _norm(functional, parameters.norm, x[:, 0]))
        return functional.cross_entropy(logits.float(), labels.long())

    return parameters, loss


def step(parameters: Any, loss: Callable[[], Any]) -> Callable[[], Any]:
    """A function that trains once, from where it was left."""
    leaves = [leaf for leaf in jax.tree.leaves(parameters) if hasattr(leaf, "requires_grad")]
    norm = parameters.blocks[0].attention_norm.weight
    optimizer = torch().optim.AdamW(leaves, lr=3e-4, weight_decay=1e-4, fused=True)

    def train() -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach(), optimizer.state[norm]["exp_avg"].clone()

    return train


def _parameters(model: Any) -> Any:
    """The model's own Module with tensors for arrays, copied: a step writes to them."""

    def tensor(leaf: Any) -> Any:
        return to_torch(leaf).clone().requires_grad_(True) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(tensor, model)


def _linear(functional: Any, linear: Any, x: Any) -> Any:
    return functional.linear(x, linear.weight, linear.bias)


def _norm(functional: Any, norm: Any, x: Any) -> Any:
    return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def _block(functional: Any, model: shapes.Model, block: Any, x: Any) -> Any:
    attention = block.attention
    normed = _norm(functional, block.attention_norm, x)
    heads = [
        _linear(functional, proj, normed).unflatten(-1, (model.heads, -1)).transpose(1, 2)
        for proj in (attention.query_proj, attention.key_proj, attention.value_proj)
    ]
    attended = functional.scaled_dot_product_attention(*heads, is_causal=model.causal)
    x = x + _linear(functional, attention.output_proj, attended.transpose(1, 2).flatten(2))
    up, down = block.mlp.layers
    return x + _linear(
        functional,
        down,
        functional.gelu(_linear(functional, up, _norm(functional, block.mlp_norm, x)), approximate="tanh"),
    )
