"""What the recipes share: training runs, splits of datasets, tiny text models."""
