-- What queries of the analyzer have in common, under one name each. `views` makes them on every connection; DuckDB
-- puts the text in place of each call. What stands in braces is filled in from numerics: tolerance.py, formulas.py.

-- Unit roundoff of a dtype, by its name; 0 for one whose values are exact, and for null.
CREATE TEMP MACRO roundoff(dtype) AS {roundoff};

-- The module that owns a parameter, by the parameter's FQN; '' is the root.
CREATE TEMP MACRO owner_of(parameter) AS regexp_replace(parameter, '\.?[^.]*$', '');

-- The Euclidean distance of two sketches of as many lanes, in float64.
CREATE TEMP MACRO sketch_distance(a, b) AS list_distance(a::DOUBLE[], b::DOUBLE[]);

-- |a - b| over the larger norm, of two summaries: from their sketches, where these are of one width, else from their
-- norms alone. 0 where both norms are; null where counts of NaN or of infinities differ.
CREATE TEMP MACRO relative_error(a_norm, b_norm, a_sketch, b_sketch, a_nans, b_nans, a_infs, b_infs) AS (
    CASE WHEN a_nans <> b_nans OR a_infs <> b_infs THEN NULL
    WHEN greatest(a_norm, b_norm) = 0 THEN 0
    WHEN len(a_sketch) = len(b_sketch) THEN sketch_distance(a_sketch, b_sketch) / greatest(a_norm, b_norm)
    ELSE abs(a_norm - b_norm) / greatest(a_norm, b_norm) END);

-- What a is multiplied by to come closest to b, both of as many lanes of float64; a is not all zeros.
CREATE TEMP MACRO least_squares_factor(a, b) AS list_dot_product(a, b) / list_dot_product(a, a);

-- The norm of what `factor` times a leaves over of b, relative to the norm of a.
CREATE TEMP MACRO left_over(a, b, factor) AS
    list_distance([x * factor FOR x IN a], b) / sqrt(list_dot_product(a, a));

-- A sketch of 16 lanes on the 4 that those of Nodes have, added in its own float32.
CREATE TEMP MACRO on_node_lanes(sketch) AS [
    sketch[1] + sketch[5] + sketch[9] + sketch[13], sketch[2] + sketch[6] + sketch[10] + sketch[14],
    sketch[3] + sketch[7] + sketch[11] + sketch[15], sketch[4] + sketch[8] + sketch[12] + sketch[16]];


-- Whether a row lies where something holds that begins at one place of a rank's step and lasts until another.
CREATE TEMP MACRO holds_at(its_rank, its_step, start, until, at_rank, at_step, at_place) AS (
    its_rank = at_rank AND its_step = at_step AND start <= at_place AND at_place < until);

-- Whether two losses are further apart than this share of the larger one; whether they differ, where one is null.
CREATE TEMP MACRO losses_apart(b, c, allowed) AS (
    coalesce(abs(b - c) > greatest(abs(b), abs(c)) * allowed OR isnan(b) <> isnan(c), b IS DISTINCT FROM c));

-- What follows is asked of rows in arrays too: numerics/formulas.py says each, and what it gives.
CREATE TEMP MACRO gain(b_reads, c_reads, b_writes, c_writes) AS {gain};
CREATE TEMP MACRO share_of_floor(norm, floor_norm) AS {share_of_floor};
CREATE TEMP MACRO rounded_once(b_unit, c_unit) AS {rounded_once};
CREATE TEMP MACRO share_in_proportion(error) AS {share_in_proportion};
CREATE TEMP MACRO share_of_signs(error) AS {share_of_signs};
CREATE TEMP MACRO update_allowed(unit, norm, share, update_norm) AS {update_allowed};
