"""DeMo's network, batches, configuration and checkpoints, with SDTPS in the place of its fusion experts.

What differs on purpose from `seps.reid`: see `model.py` (network) and `batches.py` (sampler, augmentation).
"""
