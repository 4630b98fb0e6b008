"""The shape of torchvision's reference script: groups of weight decay, warm-up, EMA, a checkpoint after each epoch."""

import argparse
import os

import torch
from torch import nn

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        super().__init__(model, avg_fn=lambda old, new, _: decay * old + (1 - decay) * new, use_buffers=True)


class BasicBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + x)


def set_weight_decay(model, decay):
    """Norm layers get none."""
    norms = [p for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)]
    known = {id(p) for p in norms}
    others = [p for p in model.parameters() if id(p) not in known]
    return [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": decay}]


def train_one_epoch(model, criterion, optimizer, loader, args, epoch, model_ema=None, scaler=None):
    model.train()
    losses = []
    for i, (image, target) in enumerate(loader):
        with torch.amp.autocast("cpu", enabled=scaler is not None):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        if model_ema and i % 2 == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)
        losses.append(loss.item())
    return losses


def evaluate(model, criterion, loader):
    model.eval()
    with torch.inference_mode():
        return sum(criterion(model(image), target).item() for image, target in loader)


def main(args):
    torch.manual_seed(0)
    x = torch.randn(96, 3, 8, 8)
    data = torch.utils.data.TensorDataset(x, x.mean((2, 3)).argmax(1))
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), BasicBlock(8), BasicBlock(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(set_weight_decay(model, 1e-4), lr=args.lr, momentum=0.9, nesterov=True)
    main_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs - args.lr_warmup_epochs)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=args.lr_warmup_epochs)
    schedulers = [warmup, main_scheduler]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[args.lr_warmup_epochs])
    model_ema = ExponentialMovingAverage(model, decay=0.9)
    # (the one line)
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["lr_scheduler"])
        model_ema.load_state_dict(checkpoint["model_ema"])
        start = checkpoint["epoch"] + 1
    losses = []
    for epoch in range(start, args.epochs):
        losses += train_one_epoch(model, criterion, optimizer, loader, args, epoch, model_ema)
        scheduler.step()
        evaluate(model, criterion, loader)
        evaluate(model_ema, criterion, loader)
        checkpoint = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict(),
            "model_ema": model_ema.state_dict(), "epoch": epoch,
        }  # fmt: skip
        torch.save(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    print("loss", losses[0], losses[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lr-warmup-epochs", type=int, default=1)
    parser.add_argument("--clip-grad-norm", type=float, default=1.0)
    parser.add_argument("--output-dir", default=".")
    parser.add_argument("--resume", default="")
    main(parser.parse_args())
