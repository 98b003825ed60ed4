"""The planned pipeline of a run as inline SVG: a row for each replica, time from left to right. Pure.

Of replicas that run alike one stands for all, so that the picture is as small as one pipeline. A plan with too many
computes is not drawn: it would be a grey area, and planning it takes seconds.
"""
