"""Training a drafter: data, anchors and masks, objective, trainer."""
