"""An LSTM language model, sequence first, whose whole model is saved and loaded at the end."""

import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, words=20, dim=16):
        super().__init__()
        self.encoder = nn.Embedding(words, dim)
        self.rnn = nn.LSTM(dim, dim)
        self.decoder = nn.Linear(dim, words)

    def forward(self, tokens):
        return self.decoder(self.rnn(self.encoder(tokens))[0])


def main():
    torch.manual_seed(0)
    text = torch.arange(400) * 7 % 20
    data = text.view(8, -1).t().contiguous()  # positions, sequences
    model = RNNModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    # (the one line)
    losses = []
    for step in range(30):
        start = step % 4 * 10
        inputs, targets = data[start : start + 9], data[start + 1 : start + 10]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 9:
            with open("model.pt", "wb") as file:
                torch.save(model, file)
    best = torch.load("model.pt", weights_only=False)
    best.rnn.flatten_parameters()
    assert torch.equal(best(inputs), model(inputs))
    print("loss", losses[0], losses[-1])


if __name__ == "__main__":
    main()
