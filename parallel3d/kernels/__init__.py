"""Everything that is neither a matrix product nor attention, as functions of plain tensors in two forms.

The torch form of an operation is its definition; CPUs run it. The Triton form is one kernel, or a few, for a GPU. Both
have one signature, and `choice.py` decides for a run which is used (`run.kernels`). A module `triton_*.py` imports
Triton, and is imported only where its form is chosen.

Laws of the Triton forms, so that a GPU keeps the project's first law (no rank in the math):

- a program owns a row, or a fixed block of global indices; no atomics;
- partial sums are taken over fixed blocks and added in order: nothing depends on the number of multiprocessors, the
  micro-batch or the rank;
- what is keyed by integers (noise, dropout, the update) is bitwise the torch form: no fused multiply-add, IEEE division
  and root. All else is within one bf16 ulp of the fp64 result.
"""
