"""The attacks, one file each: settings, needs, what runs it, and words for people; they import torch lazily."""
