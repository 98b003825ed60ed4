"""Estimates a run before anything is rented: memory, time, money, and what failures cost. Pure.

layered_parameters.py              a model's parameters by layer, so that stages can be put together
state_bytes.py, rank_memory.py     bytes of a rank of each stage, by what they are for
pipeline_facts.py                  what a schedule holds and how long it idles
stage_work.py, communication.py    kernels and collectives of a stage                      -> seconds
machines.py                        "8xH100-80GB:16"                                        -> Machines
layout_estimate.py                 one layout on machines                                  -> LayoutEstimate
layout_search.py, cliffs.py        all layouts, ranked; why the best wins; what to beware of
failure_costs.py                   goodput, and what width is worth
rental.py, fits.py                 dollars for tokens; memory over micro-batch, loss over batch
machine_comparison.py              several machines in one table, the cheapest named
cost_report.py                     the text of `parallel3d plan --devices`
"""
