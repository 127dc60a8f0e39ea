"""Detection: RetinaNet of torchvision on a backbone of this library, on synthetic scenes.

    python examples/detector.py pvt

The backbones are those of the recipe ``segmentation`` at its smoke size. The boxes of a scene hold what is seen of its
shapes. The score is the average precision at an overlap (IoU) of 0.5: the area under precision over recall, the mean
over the classes. A run that was stopped goes on.
"""

import argparse

import torch
from torch import nn

import tokenmix.hosts.torchvision  # noqa: F401  # before torchvision, where it was built for another torch
from tokenmix.lab.data import SCENE_CLASSES, scene_of_shapes
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report.runs import read_run
from tokenmix.lab.train import OptimConfig, OwnData, OwnModel, RunConfig, TrainConfig, train
from tokenmix.models import build_model

# isort: split
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, box_iou, masks_to_boxes

BACKBONES = ("pvt", "resnet", "external", "attention", "aft_conv")
SIZE, CHANNELS, MOST, SEEN = 64, 48, 5, 16  # pixels, features of each map, shapes of a scene, fewest pixels of a shape
SIDES = [tuple(side * 2 ** (k / 3) for k in range(3)) for side in (10, 20, 40)]  # of the anchors, at strides 8, 16, 32


def scenes(seed, count, start=0):
    """Draw images (count, 3, 64, 64) in 0..1 and their boxes (count, 5, 5): x1, y1, x2, y2, class; class 0 is none."""
    images, boxes = torch.empty(count, 3, SIZE, SIZE), torch.zeros(count, MOST, 5)
    for i in range(count):
        image, owner, kinds = scene_of_shapes(seed, start + i, (SIZE, SIZE))
        seen = [k for k in range(1, len(kinds)) if (owner == k).sum() >= SEEN]
        images[i] = image / 255
        if seen:
            corners = masks_to_boxes(torch.stack([owner == k for k in seen]))
            boxes[i, : len(seen), :4] = corners + torch.tensor([0, 0, 1, 1])  # the last pixel is inside
            boxes[i, : len(seen), 4] = kinds[seen]
    return images, boxes


class Maps(nn.Module):
    """The maps of a backbone at strides 8, 16 and 32, through a feature pyramid network."""

    def __init__(self, name):
        super().__init__()
        self.backbone = build_model(RECIPES["segmentation"].config(name, "smoke").model.backbone)
        maps = self.backbone.feature_maps(torch.zeros(2, 3, SIZE, SIZE))[-3:]
        self.fpn = FeaturePyramidNetwork([m.shape[1] for m in maps], CHANNELS)
        self.out_channels = CHANNELS

    def forward(self, images):
        maps = self.backbone.feature_maps(images)[-3:]
        return self.fpn({str(i): m for i, m in enumerate(maps)})


class Detector(RetinaNet):
    """RetinaNet that returns what its heads say; ``loss`` compares that with boxes and ``detect`` makes boxes of it."""

    def __init__(self, backbone):
        anchors = AnchorGenerator(tuple(SIDES), ((0.5, 1.0, 2.0),) * len(SIDES))
        size = {"min_size": SIZE, "max_size": SIZE}
        super().__init__(Maps(backbone), len(SCENE_CLASSES), anchor_generator=anchors, **size)

    def forward(self, images):
        batch, _ = self.transform(list(images))
        maps = list(self.backbone(batch.tensors).values())
        return self.head(maps), self.anchor_generator(batch, maps)

    def loss(self, outputs, boxes):
        """Return the focal loss of the classes plus the loss of the boxes."""
        targets = [{"boxes": b[b[:, 4] > 0, :4], "labels": b[b[:, 4] > 0, 4].long()} for b in boxes]
        return sum(self.compute_loss(targets, *outputs).values())

    @torch.no_grad()
    def detect(self, images, most=200, overlap=0.5):
        """Return boxes, labels and scores of each image, the surest first, without boxes that repeat a surer one."""
        heads, anchors = self.eval()(images)
        return [self._choose(heads, i, each, most, overlap) for i, each in enumerate(anchors)]

    def _choose(self, heads, i, anchors, most, overlap):
        logits = heads["cls_logits"][i]
        scores, place = logits.sigmoid().flatten().topk(most)
        labels, at = place % logits.shape[1], place // logits.shape[1]
        boxes = self.box_coder.decode_single(heads["bbox_regression"][i][at], anchors[at]).clamp(0, SIZE)
        repeats = (box_iou(boxes, boxes) > overlap) & (labels[:, None] == labels)
        keep = torch.ones(most, dtype=torch.bool)
        for j in range(most):
            if keep[j]:
                keep[j + 1 :] &= ~repeats[j, j + 1 :]
        return {"boxes": boxes[keep], "labels": labels[keep], "scores": scores[keep]}


def average_precision(found, boxes, overlap=0.5):
    """Return the mean over the classes of the area under precision over recall, in 0..1."""
    return sum(_class_precision(found, boxes, kind, overlap) for kind in range(1, len(SCENE_CLASSES))) / 5


def _class_precision(found, boxes, kind, overlap):
    """Match detections of a class, the surest first, each to a box that nothing has matched, and return the area."""
    true = [b[b[:, 4] == kind, :4] for b in boxes]
    count = sum(map(len, true))
    free = [torch.ones(len(t), dtype=torch.bool) for t in true]
    guesses = [
        (sure.item(), i, box)
        for i, each in enumerate(found)
        for sure, box, label in zip(each["scores"], each["boxes"], each["labels"], strict=True)
        if label == kind
    ]
    hits = []
    for _, i, box in sorted(guesses, key=lambda guess: -guess[0]):
        shared = (box_iou(box[None], true[i])[0] * free[i]).max(0) if len(true[i]) else None
        hits.append(shared is not None and shared.values.item() >= overlap)
        if hits[-1]:
            free[i][shared.indices] = False
    right = torch.tensor(hits, dtype=torch.float64).cumsum(0)
    precision = right / torch.arange(1, len(hits) + 1)
    best = precision.flip(0).cummax(0).values.flip(0)  # the highest precision at this recall or a higher one
    return ((best * torch.tensor(hits)).sum() / max(count, 1)).item()


VALID = [scenes(1, 25, 25 * i) for i in range(8)]


def score(step, model):
    """Return the average precision on 200 scenes that are not trained on."""
    found = [each for images, _ in VALID for each in model.detect(images)]
    return {"ap50": average_precision(found, [b for _, boxes in VALID for b in boxes])}


def run(backbone, out, steps=600, lr=2e-3, seed=0):
    """Train on new scenes in every step; return the line of the last evaluation."""
    torch.manual_seed(seed)
    model = Detector(backbone)
    loop = TrainConfig(steps=steps, seed=seed, eval_every=steps, save_every=steps, threads=1, device="cpu")
    config = RunConfig(OwnModel(), OwnData(), OptimConfig(lr=lr, warmup=min(50, steps), clip=1.0), loop)
    own = {"model": model, "batches": lambda step: scenes(2 + seed, 8, 8 * step), "valid": VALID, "loss": model.loss}
    train(config, out, resume=True, callbacks=[score], **own)
    return read_run(out).evals[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone", choices=BACKBONES)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", default="runs/detector")
    given = parser.parse_args()
    line = run(given.backbone, f"{given.out}/{given.backbone}", given.steps)
    print(f"{given.backbone}: average precision {line['ap50']:.3f} at an overlap of 0.5, on 200 scenes")
