"""Estimates a run before anything is rented: memory, time, money, and what failures cost. Pure.

state_bytes.py, rank_memory.py     bytes of a rank of each stage, by what they are for
pipeline_facts.py                  what a schedule holds and how long it idles
"""
