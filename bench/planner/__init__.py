"""Compares predictions of the planner with measurements on the machine: ``python -m bench.planner``.

cases     models, batches and limits: those that the predictions were tuned on, and those that were held out
draw      plans drawn at random from all that fit
worker    one process per case: wraps, trains a few steps under each plan, measures
accuracy  predictions of today's models from the recorded profiles, compared with what was measured
regret    the chosen plan against others on the same machine
"""
