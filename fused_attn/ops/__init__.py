"""Registered ops (torch.library), with their derivatives and decompositions."""
