-- table: rounding
-- What the rule allows from a place of a rank's step on, by the coarsest arithmetic used so far.
-- key: rank, step, start
-- columns:
--   rank INTEGER: the rank
--   step INTEGER: the step
--   start DOUBLE: the first place for which it holds
--   until DOUBLE: the place from which on it does not
--   unit DOUBLE: the unit roundoff
--   forward DOUBLE: what an output may err by, relative
--   backward DOUBLE: what a gradient may
--   norm DOUBLE: by how much a norm may change at one link
--   layer DOUBLE: what one layer alone may add
-- reads: kept_<table>
SELECT unnest($1::INTEGER[]) AS rank, unnest($2::INTEGER[]) AS step, unnest($3::DOUBLE[]) AS start,
    unnest($4::DOUBLE[]) AS until, unnest($5::DOUBLE[]) AS unit, unnest($6::DOUBLE[]) AS forward,
    unnest($7::DOUBLE[]) AS backward, unnest($8::DOUBLE[]) AS norm, unnest($9::DOUBLE[]) AS layer
