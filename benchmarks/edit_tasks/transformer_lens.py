"""The tasks with TransformerLens, on a model of its own with the same weights."""

# pyright: reportMissingImports=false
from __future__ import annotations

import itertools
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge

from benchmarks.edit_tasks.net import BLOCKS, HEADS, LENGTH, VOCABULARY, WIDTH, build

__all__: list[str] = []

_OURS: dict[str, str] = {
    "tok_embed": "embed", "pos": "places", "layers": "h", "o": "out", "fc_in": "0", "fc_out": "2",
}  # fmt: skip


def prepare() -> TransformerBridge:
    net, weights = _bridge(), build().state_dict()
    for name, parameter in net.original_model.named_parameters():
        own = ".".join(_OURS.get(part, part) for part in str(name).split(".") if part != "_original_component")
        with torch.no_grad():
            parameter.copy_(weights.pop(own))
    assert not weights, weights.keys()
    return net


def _bridge() -> TransformerBridge:
    config = {
        "n_layers": BLOCKS, "d_model": WIDTH, "n_ctx": LENGTH, "d_head": WIDTH // HEADS, "n_heads": HEADS,
        "d_mlp": 4 * WIDTH, "act_fn": "relu", "d_vocab": VOCABULARY, "normalization_type": None,
    }  # fmt: skip
    return TransformerBridge.boot_native(config)


def read_one(net: TransformerBridge, x: torch.Tensor) -> Any:
    return net.run_with_cache(x)[1]["resid_post", 1]


def read_all(net: TransformerBridge, x: torch.Tensor) -> Any:
    _, cache = net.run_with_cache(x)
    return [cache["resid_post", i] for i in range(3)]


def read_gradient(net: TransformerBridge, x: torch.Tensor) -> Any:
    return net.run_with_cache(x, incl_bwd=True, return_type="loss")[1]["blocks.1.hook_resid_post_grad"]


def without_a_head(net: TransformerBridge, x: torch.Tensor) -> Any:
    zero = torch.tensor([[0.0], [1.0]])
    return net.run_with_hooks(x, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z * zero)])


def patch_a_position(net: TransformerBridge, x: torch.Tensor, clean_x: torch.Tensor) -> Any:
    _, cache = net.run_with_cache(clean_x)
    at = torch.arange(6)[:, None] == 3
    return net.run_with_hooks(
        x, fwd_hooks=[("blocks.1.hook_resid_post", lambda y, hook: torch.where(at, cache[hook.name], y))]
    )


def mean_ablate(net: TransformerBridge, x: torch.Tensor, many: torch.Tensor) -> Any:
    _, cache = net.run_with_cache(many)
    return net.run_with_hooks(
        x, fwd_hooks=[("blocks.1.hook_attn_out", lambda y, hook: cache[hook.name].mean(0).expand_as(y))]
    )


def scale_a_part(net: TransformerBridge, x: torch.Tensor) -> Any:
    return net.run_with_hooks(x, fwd_hooks=[("blocks.1.hook_attn_out", lambda y, hook: y * 0.5)])


def steer_one_step(net: TransformerBridge, x: torch.Tensor, vector: torch.Tensor) -> Any:
    step = itertools.count()
    with net.hooks([("blocks.1.hook_resid_post", lambda y, hook: y + vector if next(step) == 2 else y)]):
        return net.generate(x, 4, do_sample=False, use_past_kv_cache=False, stop_at_eos=False, verbose=False)


def scale_gradients(net: TransformerBridge, x: torch.Tensor) -> Any:
    with net.hooks(bwd_hooks=[("blocks.1.hook_resid_post", lambda gradient, hook: (gradient * 0.5,))]):
        net(x).sum().backward()
    return net.W_E.grad


def skip_a_block(net: TransformerBridge, x: torch.Tensor) -> Any:
    hooks = [(f"blocks.1.hook_{what}_out", lambda y, hook: y * 0) for what in ("attn", "mlp")]
    return net.run_with_hooks(x, fwd_hooks=hooks)


def stop_early(net: TransformerBridge, x: torch.Tensor) -> Any:
    return net(x, stop_at_layer=2)


def edit_and_read(net: TransformerBridge, x: torch.Tensor) -> Any:
    with net.hooks([("blocks.0.hook_resid_post", lambda y, hook: y * 0.5)]):
        return net.run_with_cache(x)[1]["resid_post", 2]
