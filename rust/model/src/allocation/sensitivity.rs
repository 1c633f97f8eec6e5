//! Factors of the relative squared error of a matrix in the loss, by its place in the model.
//!
//! The factors are relative to the query projection of a layer: the KL divergence with one kind of matrix in int4,
//! divided by the squared errors. They were measured on the embedded model (`benches/quality/README.md`), those of
//! attention and embedding also on SmolLM2-135M (`benches/quality/allocation.py --kinds`), and are rounded means.

/// Returns the kind of the matrix of a role: without `.weight`, and without the number of an expert. All matrices of a
/// kind together have one factor.
pub(super) fn kind(role: &str) -> String {
    let parts = role.trim_end_matches(".weight").split('.').enumerate();
    let kept = parts.filter(|(place, part)| *place <= 1 || part.parse::<usize>().is_err()).map(|(_, part)| part);
    kept.collect::<Vec<_>>().join(".")
}

/// Returns the factor of a kind, such as `layers.3.attention.v`, in a model of `layers` layers.
pub(super) fn of_kind(kind: &str, layers: usize) -> f64 {
    let mut parts = kind.split('.');
    let layer = match (parts.next(), parts.next()) {
        // Errors of these two reach every logit.
        (Some("embedding" | "lm_head"), None) => return 150.0,
        (Some("layers"), Some(index)) => index.parse::<usize>().ok(),
        _ => None,
    };
    // Other matrices outside the layers were not measured.
    let Some(layer) = layer else { return 1.0 };
    let eighth = (layers / 8).max(1);
    match parts.next_back() {
        Some("v") => 2.5,
        Some("gate" | "up") => 2.0,
        // Activations of the first layers have outliers.
        Some("down") if layer < eighth => 15.0,
        Some("down") if layer >= layers.saturating_sub(eighth) => 4.0,
        Some("down") => 2.0,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::{kind, of_kind};

    #[test]
    fn experts_are_of_one_kind() {
        let of = |expert: usize| kind(&format!("layers.3.ffn.experts.{expert}.down.weight"));
        assert_eq!((of(0), of(17)), ("layers.3.ffn.experts.down".to_owned(), "layers.3.ffn.experts.down".to_owned()));
    }

    #[test]
    fn factors_depend_on_kind_and_depth() {
        let of = |role: &str| of_kind(&kind(&format!("{role}.weight")), 16);
        assert_eq!(of("embedding"), of("lm_head"));
        assert_eq!(of("embedding_projection"), of("layers.3.attention.q"));
        assert_eq!(of("layers.3.attention.q"), of("layers.15.attention.output"));
        assert!(of("layers.3.attention.v") > of("layers.3.attention.q"));
        let down = |layer: usize| of(&format!("layers.{layer}.ffn.down"));
        assert_eq!((down(0), down(2)), (down(1), down(13)));
        assert_eq!(down(14), down(15));
        assert!(down(0) > down(15) && down(15) > down(7) && of("embedding") > down(0));
    }
}
