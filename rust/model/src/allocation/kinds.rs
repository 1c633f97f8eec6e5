//! Kinds of matrices, by their roles.

/// Number of parts of the layers whose matrices of a kind are measured together.
const PARTS: usize = 8;

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
    use super::{class, kind};

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
