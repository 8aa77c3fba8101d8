"""Contestants that are clients of ProTrain: each trains by its own loop, with ProTrain or plain.

run       what a client is given
loops     clients whose users write the loop: PyTorch, Lightning, Accelerate
trainers  clients that inherit from the Trainer of transformers
timed     times the steps of one of them
"""
