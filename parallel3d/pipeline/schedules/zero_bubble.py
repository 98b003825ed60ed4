"""ZB-H1 (Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.1): 1F1B with a split backward pass.

The gradients of inputs, T_B, are sent on at once. The gradients of weights, T_W, need no message and run when nothing
else can. No replica holds more than P micro-batches from their forward to the end of that half, which is what 1F1B's
first stage holds anyway. On a straight grid of equal costs the bubble is (P - 1)(T_F + T_B - T_W), where 1F1B's is
(P - 1)(T_F + T_B + T_W): the paper's table 2.
"""

from __future__ import annotations

from parallel3d.pipeline.schedules.one_f_one_b import OneFOneB


class ZeroBubbleH1(OneFOneB):
    """1F1B whose products for the weights fill its gaps."""

    name = "zb-h1"
    summary = "zero bubble: splits the backward pass and holds pp_size on every stage; a third of 1f1b's bubble."
    is_default = False
    splits_backward = True

    def bubble(self, num_stages: int, num_chunks: int, num_micro_batches: float) -> float:
        return (num_stages - 1) / (3 * num_micro_batches + num_stages - 1)


SCHEDULE = ZeroBubbleH1()
