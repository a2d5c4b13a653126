"""Stand-in for ``torch.utils``, which contains ``torch.utils.data``."""
