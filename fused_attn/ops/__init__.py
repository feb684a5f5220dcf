"""The ops of torch.library, their derivatives and decompositions."""
