"""A model with torch's own transformer layers: an encoder, and a decoder with cross-attention over another length."""

import torch
from torch import nn


class Translator(nn.Module):
    """Sources ``[N, 5, 4]`` and targets ``[N, 3, 4]`` to ``[N, 3, 2]``."""

    def __init__(self, width=8, heads=2, batch_first=True):
        super().__init__()
        options = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": batch_first}
        self.source, self.target = nn.Linear(4, width), nn.Linear(4, width)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, heads, **options), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(width, heads, **options), 1)
        self.head = nn.Linear(width, 2)

    def forward(self, source, target):
        mask = torch.full((3, 3), -torch.inf, dtype=torch.float64).triu(1)
        memory = self.encoder(self.source(source))
        return self.head(self.decoder(self.target(target), memory, tgt_mask=mask, tgt_is_causal=True))
