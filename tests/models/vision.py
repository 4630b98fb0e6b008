"""Small models with the structure of torchvision's vit_b_16 and swin_t: weights are applied as these apply them."""

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Sequential):
    def __init__(self, width, hidden):
        super().__init__(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(hidden, width), nn.Dropout(0.0)
        )


class EncoderBlock(nn.Module):
    """A block of torchvision's VisionTransformer."""

    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = Mlp(width, 2 * width)

    def forward(self, x):
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    """vit_b_16: patches, a class token, positions, blocks of ``nn.MultiheadAttention``, a head on the class token."""

    def __init__(self, width=8, heads=2, depth=2, classes=3):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.pos_embedding = nn.Parameter(torch.randn(1, 5, width) * 0.1)
        self.layers = nn.ModuleList([EncoderBlock(width, heads) for _ in range(depth)])
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embedding
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x)[:, 0])


def shifted_window_attention(x, qkv_weight, proj_weight, relative_position_bias, window, heads, shift, qkv_bias,
    proj_bias):  # fmt: skip
    """torchvision's function of this name, for sizes that are multiples of the window and without a mask."""
    n, height, width, c = x.shape
    x = torch.roll(x, (-shift, -shift), dims=(1, 2))
    rows, columns = height // window, width // window
    x = x.view(n, rows, window, columns, window, c).permute(0, 1, 3, 2, 4, 5)
    x = x.reshape(n * rows * columns, window * window, c)
    qkv = F.linear(x, qkv_weight, qkv_bias)
    q, k, v = qkv.reshape(x.shape[0], x.shape[1], 3, heads, c // heads).permute(2, 0, 3, 1, 4)
    attention = (q * (c // heads) ** -0.5).matmul(k.transpose(-2, -1)) + relative_position_bias
    x = F.softmax(attention, dim=-1).matmul(v).transpose(1, 2).reshape(x.shape[0], x.shape[1], c)
    x = F.linear(x, proj_weight, proj_bias)
    x = x.view(n, rows, columns, window, window, c).permute(0, 1, 3, 2, 4, 5).reshape(n, height, width, c)
    return torch.roll(x, (shift, shift), dims=(1, 2))


class ShiftedWindowAttention(nn.Module):
    """Holds two Linear layers and never calls them."""

    def __init__(self, width, heads, window, shift):
        super().__init__()
        self.window, self.heads, self.shift = window, heads, shift
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.1)
        place = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offset = (place[:, :, None] - place[:, None]) + window - 1
        self.register_buffer("index", offset[0] * (2 * window - 1) + offset[1], persistent=False)

    def relative_position_bias(self):
        return self.relative_position_bias_table[self.index].permute(2, 0, 1)[None]

    def forward(self, x):
        return shifted_window_attention(
            x, self.qkv.weight, self.proj.weight, self.relative_position_bias(), self.window, self.heads, self.shift,
            qkv_bias=self.qkv.bias, proj_bias=self.proj.bias,
        )  # fmt: skip


class SwinBlock(nn.Module):
    def __init__(self, width, heads, window, shift):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = ShiftedWindowAttention(width, heads, window, shift), Mlp(width, 2 * width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    """swin_t: patches, stages of shifted windows, a merge between them, a head on the mean."""

    def __init__(self, width=4, heads=2, classes=3):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 2, stride=2), nn.LayerNorm(2 * width)
        stage = [SwinBlock(width, heads, 2, 0), SwinBlock(width, heads, 2, 1)]
        self.features = nn.Sequential(*stage, PatchMerging(width), SwinBlock(2 * width, heads, 2, 0))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.features(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean((1, 2)))
