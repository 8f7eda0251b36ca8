-- The claims of objects that no version had, which are removed after a day.
CREATE INDEX versions_claimed ON versions (time) WHERE owner = '';
