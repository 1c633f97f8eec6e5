//! Quantization: the format of each matrix of a model.
//!
//! A few matrices cause most of the quantization error and take few bytes; they get more bits. `benches/quality` has
//! the study behind the table.

use ferrule_formats::FloatDtype;
use ferrule_kernels::Format::{self, Bf16, F16, F32, Int4, Int6, Int8, Q8_0};

use crate::weights::{QUANTIZATION, Source, View};

/// Quantization of the weights of a model: a row of the table, with its public name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    name: &'static str,
    /// Format of the embedding and lm_head, which are often one matrix.
    embedding_and_lm_head: Format,
    /// Format of the value projection, and of the down projection in the first and last layers.
    sensitive: Format,
    /// Format of all other matrices.
    usual: Format,
    /// Whether weights that are quantized in the checkpoint keep their stored format.
    as_stored: bool,
}

impl Quantization {
    /// All quantizations, widest first.
    pub const ALL: &'static [Self] = &[
        // name, then formats: [embedding and lm_head, sensitive, usual]
        Self::F32,
        Self::BF16,
        Self::row("f16", [F16, F16, F16]),
        Self::row("int8", [Int8, Int8, Int8]),
        Self::row("int4", [Int6, Int6, Int4]),
    ];

    /// Full precision.
    pub(crate) const F32: Self = Self::row("f32", [F32, F32, F32]);

    /// Full precision in the least memory: matrices that are stored in bf16 or f16 keep that format, others get f32.
    pub(crate) const EXACT: Self = Self { name: "exact", as_stored: true, ..Self::F32 };

    /// Selection of `auto` for encoders: int8 lowers the cosine with f32 below 0.9995.
    pub(crate) const BF16: Self = Self::row("bf16", [Bf16, Bf16, Bf16]);

    /// Selection of `auto` for other checkpoints of floating-point weights.
    pub(crate) const PLAIN: Self = Self::row("int8", [Int8, Int8, Int8]);

    /// Selection of `auto` for quantized checkpoints: each matrix keeps its stored format if kernels support its
    /// blocks; other matrices get a wider format.
    pub(crate) const STORED: Self = Self { name: "stored", as_stored: true, ..Self::PLAIN };

    const fn row(name: &'static str, [embedding_and_lm_head, sensitive, usual]: [Format; 3]) -> Self {
        Self { name, embedding_and_lm_head, sensitive, usual, as_stored: false }
    }

    /// Returns the best quantization for weights as they are stored, of a `causal` model or an encoder; for a packed
    /// file, the one that it is packed in.
    #[must_use]
    pub fn auto(source: Source<'_>, causal: bool) -> Self {
        match source {
            Source::Checkpoint(checkpoint) if checkpoint.is_quantized() => Self::STORED,
            Source::Packed { file, .. } => {
                let named = |each: &&Self| file.metadata(QUANTIZATION) == Some(each.name);
                *Self::ALL.iter().chain([&Self::STORED]).find(named).unwrap_or(&Self::PLAIN)
            }
            _ if !causal => Self::BF16,
            _ => Self::PLAIN,
        }
    }

    /// Returns the quantization with this name, if there is one.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|quantization| quantization.name == name)
    }

    /// Returns the name that users write.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns whether every matrix is stored as `format`.
    #[must_use]
    pub fn is_all(self, format: Format) -> bool {
        [self.embedding_and_lm_head, self.sensitive, self.usual] == [format; 3]
    }

    /// Returns whether a recipe can replace the formats of single matrices.
    pub(crate) fn takes_recipes(self) -> bool {
        !self.as_stored && self.usual.is_integer()
    }

    /// Returns the format of the embedding and lm_head.
    pub(crate) fn embedding_and_lm_head(self) -> Format {
        self.embedding_and_lm_head
    }

    /// Returns the format of the value projection.
    pub(crate) fn values(self) -> Format {
        self.sensitive
    }

    /// Returns the format of the down projection in layer `layer` of `layers`. The first and the last eighth of the
    /// layers, at least one each, are sensitive.
    pub(crate) fn down(self, layer: usize, layers: usize) -> Format {
        let eighth = (layers / 8).max(1);
        if (eighth..layers.saturating_sub(eighth)).contains(&layer) { self.usual } else { self.sensitive }
    }

    /// Returns the format of a stored matrix with `columns` columns, for which the table says `usual`.
    pub(crate) fn of_stored(self, usual: Format, view: &View<'_>, columns: usize) -> Format {
        if self == Self::EXACT {
            return self.of_lookup(view);
        }
        if !self.as_stored || !usual.is_integer() {
            return usual;
        }
        let bits = view.tensor().stored_bits();
        // Weights from a quantized checkpoint lie on a grid that blocks of 32 approximate better than a rotation, which
        // spreads it. Matrices that are not quantized get the same activations as their neighbours.
        let wider = match Q8_0.stored_block() {
            _ if bits < 4.0 => Int6,
            Some(block) if columns.is_multiple_of(block.inputs) => Q8_0,
            _ => Int8,
        };
        view.blocks(columns).and_then(|layout| Format::named(layout.name())).unwrap_or(wider)
    }

    /// Returns the format of a matrix whose rows are looked up and not multiplied. A token reads one row, so wider
    /// formats cost no time.
    pub(crate) fn of_lookup(self, view: &View<'_>) -> Format {
        match view.tensor().float_dtype().filter(|_| self.as_stored) {
            Some(FloatDtype::F32) => F32,
            Some(FloatDtype::Bf16) => Bf16,
            Some(FloatDtype::F16) => F16,
            None => self.embedding_and_lm_head,
        }
    }

    /// Returns the format of all other matrices.
    pub(crate) fn usual(self) -> Format {
        self.usual
    }
}

#[cfg(test)]
mod tests {
    use ferrule_formats::BlockLayout;

    use super::*;

    #[test]
    fn named_finds_quantizations_but_not_formats() {
        for quantization in Quantization::ALL {
            assert_eq!(Quantization::named(quantization.name()), Some(*quantization));
        }
        assert_eq!(Quantization::named(Quantization::PLAIN.name()), Some(Quantization::auto(Source::Random, true)));
        assert_eq!(Quantization::named("bf16"), Some(Quantization::auto(Source::Random, false)));
        assert_eq!(Quantization::named("int6"), None);
        assert_eq!(Quantization::named("auto"), None);
    }

    #[test]
    fn the_first_and_the_last_eighth_of_the_down_projections_are_sensitive() {
        let int4 = Quantization::named("int4").unwrap();
        for (layers, sensitive) in
            [(1, vec![0]), (2, vec![0, 1]), (6, vec![0, 5]), (15, vec![0, 14]), (16, vec![0, 1, 14, 15])]
        {
            let found: Vec<_> = (0..layers).filter(|layer| int4.down(*layer, layers) == Int6).collect();
            assert_eq!(found, sensitive, "of {layers}");
        }
        assert_eq!(Quantization::named("int8").unwrap().down(0, 16), Int8);
    }

    #[test]
    fn block_layouts_match_those_of_the_kernels() {
        for layout in BlockLayout::ALL {
            let block = Format::named(layout.name()).and_then(Format::stored_block).unwrap();
            assert_eq!((block.inputs, block.bytes), (layout.inputs(), layout.bytes()), "{}", layout.name());
        }
    }

    #[test]
    fn is_all_requires_the_format_in_every_matrix() {
        assert!(Quantization::named("f32").unwrap().is_all(F32));
        assert!(!Quantization::named("bf16").unwrap().is_all(F32));
        assert!(!Quantization::named("int4").unwrap().is_all(Int4));
    }
}
