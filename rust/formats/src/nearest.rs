//! Finding the name that a caller probably meant.

/// Returns the candidate with the smallest edit distance to `name`, if that is at most half of its length.
pub fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut best = None;
    let mut limit = name.len() / 2 + 1;
    for candidate in candidates {
        // The difference in length is a lower bound of the distance, which avoids most of the work.
        if candidate.len().abs_diff(name.len()) < limit {
            let distance = edit_distance(name.as_bytes(), candidate.as_bytes());
            if distance < limit {
                (best, limit) = (Some(candidate), distance);
            }
        }
    }
    best
}

/// Returns the end of an error message that suggests `nearest`, or nothing.
pub(crate) fn suggestion(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| format!("; the nearest name is {name:?}"))
}

/// Returns the number of insertions, deletions and replacements of bytes between two names (Levenshtein distance).
fn edit_distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distance_is_levenshtein() {
        for (a, b, distance) in [("", "", 0), ("", "ab", 2), ("kitten", "sitting", 3), ("flaw", "lawn", 2)] {
            assert_eq!(edit_distance(a.as_bytes(), b.as_bytes()), distance);
            assert_eq!(edit_distance(b.as_bytes(), a.as_bytes()), distance);
        }
    }

    #[test]
    fn nearest_returns_the_closest_name_or_none() {
        let names = ["model.layers.0.q.weight", "layers.0.q.weight", "lm_head.weight"];
        assert_eq!(nearest("model.layers.0.k.weight", names.into_iter()), Some("model.layers.0.q.weight"));
        assert_eq!(nearest("x", names.into_iter()), None);
    }
}
