"""Plans written as the settings of other training frameworks: one module a target, one shape of answer."""
