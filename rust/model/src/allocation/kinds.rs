//! Kinds of matrices, by their roles, and the parts of a matrix whose formats are chosen one by one.

use std::ops::Range;

use ferrule_kernels::arch::LANES;

/// Number of parts of the layers whose matrices of a kind are measured together.
const PARTS: usize = 8;

/// Number of bands of tokens of a matrix with a row for each token of the vocabulary. Few tokens make up most of a text, and
/// tokenizers have them side by side: mostly in the order of their frequency.
pub(super) const TOKEN_BANDS: usize = 64;

/// Returns the bands of the rows of a role whose formats are chosen separately; all rows for most roles.
pub(super) fn bands(role: &str, rows: usize) -> Vec<Range<usize>> {
    let of_band = rows.div_ceil(TOKEN_BANDS).next_multiple_of(LANES).max(LANES);
    match is_of_tokens(role) {
        true => (0..rows).step_by(of_band).map(|first| first..rows.min(first + of_band)).collect(),
        false => std::iter::once(0..rows).collect(),
    }
}

/// Returns whether a matrix has a row for each token.
pub(super) fn is_of_tokens(role: &str) -> bool {
    matches!(role.trim_end_matches(".weight"), "embedding" | "lm_head")
}

/// Returns the kind of a band of tokens of a matrix of kind `kind`.
pub(super) fn kind_of_band(kind: &str, first: usize) -> String {
    format!("{kind}[{first}]")
}

/// Returns the kind of the rows of a band of kind `kind` where the model reads them as inputs, in place of multiplying them.
pub(super) fn as_inputs(kind: &str) -> String {
    format!("{kind} as inputs")
}

/// Returns the kind of the matrix of a role: without `.weight`, and without the number of an expert. All matrices of a
/// kind together have one factor in the loss.
pub(super) fn kind(role: &str) -> String {
    let parts = role.trim_end_matches(".weight").split('.').enumerate();
    let kept = parts.filter(|(place, part)| *place <= 1 || part.parse::<usize>().is_err()).map(|(_, part)| part);
    kept.collect::<Vec<_>>().join(".")
}

/// Returns the class of a kind, such as `layers.3.attention.v`, in a model of `layers` layers: the kinds whose loss is
/// measured together, those of the same name in neighbouring layers.
pub(super) fn class(kind: &str, layers: usize) -> String {
    let of_layer = kind.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    match of_layer.and_then(|(layer, name)| Some((layer.parse::<usize>().ok()?, name))) {
        Some((layer, name)) if layers > PARTS => format!("part.{}.{name}", layer * PARTS / layers),
        _ => kind.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_tokens_are_in_bands_of_whole_panels() {
        assert_eq!(bands("layers.0.ffn.up.weight", 100), *std::slice::from_ref(&(0..100)));
        assert_eq!(bands("lm_head.weight", 40), [0..16, 16..32, 32..40]);
        for rows in [1, 1000, 1024, 49_152, 151_669] {
            let found = bands("embedding.weight", rows);
            assert!(found.len() <= TOKEN_BANDS && found[0].start == 0 && found.last().unwrap().end == rows);
            assert!(found.windows(2).all(|pair| pair[0].end == pair[1].start && pair[1].start.is_multiple_of(LANES)));
        }
    }

    #[test]
    fn experts_are_of_one_kind() {
        let of = |expert: usize| kind(&format!("layers.3.ffn.experts.{expert}.down.weight"));
        assert_eq!((of(0), of(17)), ("layers.3.ffn.experts.down".to_owned(), "layers.3.ffn.experts.down".to_owned()));
    }

    #[test]
    fn neighbouring_layers_are_of_one_class() {
        let of = |layer: usize| class(&format!("layers.{layer}.ffn.down"), 30);
        assert_eq!(of(0), of(3));
        assert_ne!(of(3), of(4));
        assert_ne!(of(0), class("layers.0.ffn.up", 30));
        assert_eq!((0..30).map(of).collect::<std::collections::BTreeSet<_>>().len(), 8);
        let few = (0..8).map(|layer| class(&format!("layers.{layer}.ffn.down"), 8));
        assert_eq!(few.collect::<std::collections::BTreeSet<_>>().len(), 8);
        assert_eq!(class("embedding", 30), "embedding");
    }
}
