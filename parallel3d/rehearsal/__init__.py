"""A rehearsal of a run on a device that is not there: one rank's step on meta tensors, counted and timed by a model.

kernel_counter.py  counts the kernels, bytes and FLOPs of operators and Triton kernels      -> KernelCounts
meta_rank.py       builds a rank by the trainer's own lines and runs one train_step         -> Rehearsal
device_rows.py     bandwidth, peak and memory of devices, as data
roofline.py        KernelCounts and a device                                                -> seconds
"""
