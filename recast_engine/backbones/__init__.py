"""Base models behind one small Protocol (``base.Backbone``); ``catalogue`` lists them without torch."""
