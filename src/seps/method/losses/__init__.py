"""Training objectives: alignment (Eq. 6, InfoNCE, sigmoid, several right images), ratio (Eq. 7) and identity losses."""

from seps.method.losses.combined import SEPSLoss
from seps.method.losses.contrastive import InfoNCELoss, SigmoidLoss, distillation, infonce, sigmoid_loss
from seps.method.losses.identity import batch_hard_triplet, identity_loss
from seps.method.losses.ratio import RatioLoss, ratio_loss
from seps.method.losses.several import several_infonce
from seps.method.losses.triplet import ContrastiveLoss, triplet_loss

__all__ = [
    "ContrastiveLoss",
    "InfoNCELoss",
    "RatioLoss",
    "SEPSLoss",
    "SigmoidLoss",
    "batch_hard_triplet",
    "distillation",
    "identity_loss",
    "infonce",
    "ratio_loss",
    "several_infonce",
    "sigmoid_loss",
    "triplet_loss",
]
