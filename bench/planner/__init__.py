"""Compares predictions of the planner with measurements on the machine: ``python -m bench.planner``.

cases     models, batches and limits: those that the predictions were tuned on, and those that were held out
draw      plans drawn at random from all that fit
worker    one process per case: wraps, trains a few steps under each plan, measures
beside    several processes at once, for limits, where nothing is timed
accuracy  predictions of today's models from the recorded profiles, compared with what was measured
regret    the chosen plan against others on the same machine
largest   the largest models of four families on the paper's machines, simulated: python -m bench.planner.largest
ideas     what ideas of the paper are worth, by plans that differ in one thing: python -m bench.planner.ideas
chunk_order  chunks in another order than the product's, for ideas
slow_host a plan on a host that load slows, beside plans for that host and by hand: python -m bench.planner.slow_host
by_hand   the plans around a searched one that are tried by hand, for slow_host
layerwise what hooks on layers miss of a step's peak memory: python -m bench.planner.layerwise
profile_time  how long a profile takes: python -m bench.planner.profile_time
picture   the scatter plot
"""
