"""Request and response models that several protocols share."""
