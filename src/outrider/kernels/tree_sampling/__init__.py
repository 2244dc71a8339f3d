"""A tree of drafts verified by target probabilities: SGLang's function, for any GPU with Triton.

Name, arguments and meaning are those of `sgl_kernel`, with one difference: a token of probability 0
is never emitted. (There, a coin of exactly 0 accepts it, and an empty rest draws the last id.)
"""

from __future__ import annotations

from torch import Tensor

from outrider.kernels import use_triton
from outrider.kernels.tree_sampling import reference

__all__ = ["tree_speculative_sampling_target_only"]


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Emit tokens that follow `target_probs`, given siblings that differ and both thresholds at 1.

    B requests with T nodes each, node 0 the root; at most S tokens are emitted for a request.

    predicts:             [>= B * T] written: the token emitted after each node on the path
    accept_index:         [B, S] written: the places of the path's nodes; the rest is left as it is
    accept_token_num:     [B] written: how many drafts were accepted
    candidates:           [B, T] the drafts' token ids
    retrive_index:        [B, T] the place of each node in `predicts`
    retrive_next_token:   [B, T] the first child of each node, or -1
    retrive_next_sibling: [B, T] its next sibling, or -1
    uniform_samples:      [B, T] in [0, 1): one coin for the children of each node
    uniform_samples_for_final_sampling: [B] in [0, 1)
    target_probs:         [B, T, V] float32, the target's distribution after each node
    draft_probs:          [B, T, V] float32, zeros; rejected drafts leave their mass here
    threshold_single:     accept any draft that is at least as likely; 1 is lossless
    threshold_acc:        divides the accepted mass; 1 is lossless
    deterministic:        ignored: the sums are integers, the same in any order
    """
    _check(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_token_num,
        candidates=candidates,
        retrive_index=retrive_index,
        retrive_next_token=retrive_next_token,
        retrive_next_sibling=retrive_next_sibling,
        uniform_samples=uniform_samples,
        uniform_samples_for_final_sampling=uniform_samples_for_final_sampling,
        target_probs=target_probs,
        draft_probs=draft_probs,
    )
    if use_triton(target_probs.device):
        from outrider.kernels.tree_sampling import triton

        run = triton.tree_speculative_sampling_target_only
    else:
        run = reference.tree_speculative_sampling_target_only
    run(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        threshold_single,
        threshold_acc,
        deterministic,
    )


def _check(**tensors: Tensor) -> None:
    target, predicts = tensors["target_probs"], tensors["predicts"]
    if target.dim() != 3:
        raise ValueError(f"target_probs must be [B, T, V], not {list(target.shape)}")
    batch_size, size, _ = target.shape
    nodes, requests = (batch_size, size), (batch_size,)
    shapes = {
        "accept_index": (batch_size, tensors["accept_index"].shape[-1]),
        "accept_token_num": requests,
        "candidates": nodes,
        "retrive_index": nodes,
        "retrive_next_token": nodes,
        "retrive_next_sibling": nodes,
        "uniform_samples": nodes,
        "uniform_samples_for_final_sampling": requests,
        "draft_probs": tuple(target.shape),
    }
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, not {list(tensors[name].shape)}")
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous: call .contiguous()")
        if tensor.device != target.device:
            raise ValueError(f"{name} is on {tensor.device}, target_probs on {target.device}")
        is_float = "probs" in name or name.startswith("uniform")
        if tensor.is_floating_point() != is_float or (is_float and tensor.element_size() != 4):
            raise TypeError(f"{name} must hold {'float32' if is_float else 'integers'}")
    if predicts.numel() < batch_size * size:
        raise ValueError(f"predicts needs {batch_size * size} places, not {predicts.numel()}")
