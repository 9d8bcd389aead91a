"""From a fitted head to a product: files, adapters, attached models, exported programs."""
