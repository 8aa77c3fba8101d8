"""What each client of ProTrain costs or gains beside the same client without it: ``python -m bench.clients``.

loops     clients whose users write the loop: PyTorch, Lightning, Fabric, Accelerate
trainers  clients that inherit from the Trainer of transformers
run       what a client is given
worker    one client in a process of its own, or one of its ranks: the times and losses of its steps
results   rows, ratios, the printed table
"""
