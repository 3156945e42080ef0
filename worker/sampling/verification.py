"""The rules that turn logits into tokens. Pure functions of tensors.

Two rules accept drafts. With both, the output follows the target's distribution exactly:

- `verify` is rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv
  2302.01318). It accepts as often as any rule can, but the generated token depends on what was drafted.
- `accept_matching`: target and draft choose with the same noise, and a draft token is accepted if the target chooses it,
  too. The output is then a function of the noise and the target alone, whatever and however much was drafted (drafter
  invariance: Daliri, Musco and Suresh 2024, arXiv 2408.07978). It accepts somewhat less often. Greedy decoding is the
  special case without noise.
"""

from __future__ import annotations

import numpy as np
import torch

from speclen.worker.sampling import noise

SORTED_LOGITS = 1 << 23  # at a time: 64 rows of a vocabulary of 128k


def truncate_(
    logits: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    candidates: int | None = None,
) -> None:
    """Set the logits of tokens that must not be drawn to -inf, in place. logits: [rows, columns, vocab], float32.

    top_k, top_p, min_p: [rows]. Kept are the k most likely tokens (0: all); of these, the fewest that reach top_p, including
    the one that reaches it; of these, those at least min_p times as likely as the most likely one. Of equally likely tokens
    the lower id comes first. candidates: keep at most this many, for a draft, whose distribution may be any. Sorting a large
    vocabulary takes several times its memory, so a few columns are sorted at a time.
    """
    if top_k is not None or top_p is not None:
        num_columns = max(1, SORTED_LOGITS // (len(logits) * logits.shape[-1]))
        for part in logits.split(num_columns, dim=1):
            _keep_most_likely_(part, top_k, top_p, candidates)
    if min_p is not None:
        least = logits.amax(-1, keepdim=True) + torch.log(min_p)[:, None, None]
        logits.masked_fill_(logits < least, float("-inf"))


def _keep_most_likely_(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, candidates: int | None
) -> None:
    vocab_size = logits.shape[-1]
    if candidates is None:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    else:
        ordered, order = logits.topk(min(candidates, vocab_size), dim=-1)
    if top_k is not None:
        num_kept = torch.where(top_k == 0, vocab_size, top_k)[:, None, None]
        ordered.masked_fill_(torch.arange(ordered.shape[-1], device=logits.device) >= num_kept, float("-inf"))
    if top_p is not None:
        probs = torch.softmax(ordered, dim=-1)
        before = probs.cumsum(-1).sub_(probs)
        # 1 means all: rounding in the sum must not cut the tail. The first token always stays.
        cut = before >= torch.where(top_p < 1, top_p, torch.inf)[:, None, None]
        cut[..., 0] = False
        ordered.masked_fill_(cut, float("-inf"))
    logits.fill_(float("-inf")).scatter_(-1, order, ordered)


def most_likely(values: torch.Tensor) -> torch.Tensor:
    """argmax along the last dimension; of equal values the first. values: at least two dimensions.

    On a CPU it is computed in numpy, since torch's argmax there is not vectorised.
    """
    if not values.is_cpu:
        return values.argmax(-1)
    # numpy has no bfloat16 and is slow with float16; wider values keep their precision.
    wide = values.float() if values.itemsize == 2 else values
    return torch.from_numpy(wide.numpy().argmax(-1))


def choose(probs: torch.Tensor, exponential: torch.Tensor) -> torch.Tensor:
    """One token per distribution, drawn by an exponential race: argmax of probs / Exp(1) noise."""
    return most_likely(probs / exponential)


def accept_matching(draft_ids: torch.Tensor, target_ids: torch.Tensor, caps: torch.Tensor | None) -> torch.Tensor:
    """Length [rows] of the prefix of each draft that the target would have chosen, too.

    draft_ids: [rows, k]; target_ids: [rows, k + 1]; caps: [rows], longest prefix allowed per row, None for k. On a CPU it is
    computed in numpy, since for few numbers torch's overhead dominates.
    """
    if draft_ids.is_cpu:
        return torch.from_numpy(
            num_matching(draft_ids.numpy(), target_ids.numpy(), None if caps is None else caps.numpy())
        )
    matches = draft_ids == target_ids[:, :-1]
    if caps is not None:
        matches &= _within(caps, draft_ids.shape[1])
    return matches.cumprod(dim=1).sum(dim=1)


def num_matching(draft_ids: np.ndarray, target_ids: np.ndarray, caps: np.ndarray | None = None) -> np.ndarray:
    """As `accept_matching`, for arrays."""
    agree = draft_ids == target_ids[:, :-1]
    if caps is not None:
        agree &= np.arange(agree.shape[1]) < caps[:, None]
    return np.logical_and.accumulate(agree, axis=1).sum(axis=1)


def cut_at_broken(num_accepted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Accepted lengths [rows], cut where a row's logits [rows, k + 1, vocab] become unusable; -1 if the first ones are.

    Logits are usable if the largest one is finite. NaN counts as the largest.
    """
    num_usable = torch.isfinite(logits.amax(-1)).cumprod(dim=1).sum(dim=1)
    return torch.minimum(num_accepted, num_usable - 1)


def acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """Probability [rows, k] that each draft token is accepted if all before it are: min(1, target / draft)."""
    index = draft_ids[..., None]
    target = target_probs[:, : draft_ids.shape[1]].gather(-1, index)[..., 0]
    draft = draft_probs.gather(-1, index)[..., 0]
    return (target / draft.clamp_min(torch.finfo(draft.dtype).tiny)).clamp(max=1)


def recovery(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, num_accepted: torch.Tensor, caps: torch.Tensor | None = None
) -> torch.Tensor:
    """Unnormalised distribution [rows, vocab] of the token after the accepted prefix: max(0, target - draft).

    After a row's last draft token (see caps) it is the target's distribution.
    """
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    target = target_probs[rows, num_accepted]
    k = draft_probs.shape[1]
    if k == 0:
        return target
    within = num_accepted < (k if caps is None else caps)
    draft = draft_probs[rows, num_accepted.clamp(max=k - 1)] * within[:, None]
    difference = (target - draft).clamp_min_(0)
    # If both distributions agree up to rounding, or the draft's logits were NaN, the difference may be all 0: then the
    # target's distribution is used.
    return torch.where(difference.sum(-1, keepdim=True) > 0, difference, target)


def verify(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    caps: torch.Tensor | None,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of each draft so that outputs follow the target exactly.

    target_probs: [rows, k + 1, vocab]; draft_probs: [rows, k, vocab]; draft_ids: [rows, k], drawn from draft_probs;
    caps: [rows], drafts beyond which count as not drawn, None for k. Returns the accepted lengths [rows] and the token
    [rows] that follows each. Leviathan et al. 2023, algorithm 1.
    """
    uniform = torch.rand(draft_ids.shape, generator=generator, device=draft_ids.device)
    accepted = uniform < acceptance(target_probs, draft_probs, draft_ids)
    if caps is not None:
        accepted &= _within(caps, draft_ids.shape[1])
    num_accepted = accepted.cumprod(dim=1).sum(dim=1)
    remaining = recovery(target_probs, draft_probs, num_accepted, caps)
    return num_accepted, choose(remaining, noise.fresh(remaining, generator))


def _within(caps: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, k]: True where a draft position is inside its row's cap."""
    return torch.arange(k, device=caps.device) < caps[:, None]
