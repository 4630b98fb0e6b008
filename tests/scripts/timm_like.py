"""The shape of timm's train.py: an optimizer of its own, stepped by a scaler object, a ViT, EMA, accumulation."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            (one, two), group["step"] = group["betas"], group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 1 - one)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - two)
                root = (state["exp_avg_sq"] / (1 - two ** group["step"])).sqrt() + group["eps"]
                update = state["exp_avg"] / (1 - one ** group["step"]) / root + group["weight_decay"] * p
                norms = p.norm(), update.norm()
                ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
                p.sub_(update * ratio, alpha=group["lr"])
        return loss


class NativeScaler:
    """Calls the optimizer, as timm's does for all precisions."""

    def __call__(self, loss, optimizer, parameters, clip, need_update):
        loss.backward()
        if need_update:
            nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, 2), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, width=16, depth=2, classes=3):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 5, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def create_optimizer(model, lr, weight_decay):
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        (no_decay if p.ndim < 2 or name.endswith((".bias", "_token", "pos_embed")) else decay).append(p)
    groups = [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]
    return Lamb(groups, lr=lr)


def main():
    torch.manual_seed(0)
    x = torch.randn(48, 3, 8, 8)
    y = x.mean((2, 3)).argmax(1)
    model = VisionTransformer()
    optimizer = create_optimizer(model, 0.02, 0.05)
    # (the one line)
    ema, scaler, losses = copy.deepcopy(model).eval().requires_grad_(False), NativeScaler(), []
    parts = 2
    for update in range(12):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.02 * (1 - update / 12)
        optimizer.zero_grad()
        total = 0.0
        for i in range(parts):
            loss = F.cross_entropy(model(x[i::parts]), y[i::parts], label_smoothing=0.1) / parts
            scaler(loss, optimizer, model.parameters(), 1.0, i == parts - 1)
            total += loss.item()
        with torch.no_grad():
            for old, new in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                old.lerp_(new, 0.1)
        losses.append(total)
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pth.tar")
    print("loss", losses[0], losses[-1])


if __name__ == "__main__":
    main()
