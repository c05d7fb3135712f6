"""One model on several ranks: passes over a plain module, from outside.

Each pass takes a module, a process group and a declared plan, and leaves a module that is called as before and whose
results are those of the whole. It knows torch.distributed, not who starts the ranks, nor what they are asked for: all
ranks of a group must make the same calls in the same order.
"""
