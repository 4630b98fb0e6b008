"""Mixed precision with a gradient scaler, micro-batches and gradient clipping, on handwritten digits."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

MICRO_BATCHES = 4

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
pixels, labels = load_digits(return_X_y=True)
images, y = torch.from_numpy(pixels).float().view(-1, 1, 8, 8).to(device) / 16, torch.from_numpy(labels).to(device)
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 5

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler(device)

for epoch in range(epochs):
    model.train()
    for index in torch.randperm(1400).split(200):
        optimizer.zero_grad()
        for part in index.chunk(MICRO_BATCHES):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images[part]), y[part]) / MICRO_BATCHES
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[1400:]).argmax(1) == y[1400:]).float().mean()
    print(f"epoch {epoch + 1}: training loss {MICRO_BATCHES * loss:.4f}, test accuracy {accuracy:.3f}")
