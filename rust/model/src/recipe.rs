//! [`Recipe`]: formats of single matrices, by the names of their tensors.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use ferrule_kernels::Format;
use ferrule_kernels::arch::LANES;

use crate::pruning::Pruning;
use crate::quantization::Quantization;
use crate::spec::TensorSpec;

/// Ending of the names of matrices, which patterns can leave out.
const SUFFIX: &str = ".weight";

/// Formats of all matrices, and what happens to them before.
#[derive(Debug, Clone, Copy)]
pub struct MatrixFormats<'a> {
    /// Formats of matrices that the recipe leaves out.
    pub quantization: Quantization,
    /// Formats that replace those of the quantization, if any.
    pub recipe: Option<&'a Recipe>,
    /// Pruning before matrices are packed, if any.
    pub pruning: Option<Pruning>,
}

impl From<Quantization> for MatrixFormats<'_> {
    fn from(quantization: Quantization) -> Self {
        Self { quantization, recipe: None, pruning: None }
    }
}

/// Formats of single matrices, which replace the integer formats of a [`Quantization`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// Name in errors, such as the path of a file.
    name: String,
    /// Rules; of those that match a row of a tensor, the last one counts.
    rules: Vec<Rule>,
    /// Indices of the last rules of names that are no patterns, without the ending of matrices.
    exact: HashMap<String, usize>,
    /// Indices of rules with `*`.
    patterns: Vec<usize>,
    /// Indices of rules for some rows of a tensor.
    of_rows: Vec<usize>,
}

/// Format of the tensors that a pattern matches.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    /// The rule as written, with its rows.
    written: String,
    /// Pattern of tensor names, without the ending of matrices.
    pattern: String,
    /// Rows that get the format; all of them if `None`.
    rows: Option<Range<usize>>,
    format: Format,
}

/// A recipe that does not fit the model, or has an unknown format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecipeError {
    /// A format to which matrices cannot be quantized.
    #[error("{recipe}: format of {pattern:?} must be one of {}, got {found:?}", names(Recipe::FORMATS).join(", "))]
    Format {
        /// Name of the recipe.
        recipe: String,
        /// Pattern of tensor names.
        pattern: String,
        /// Format found.
        found: String,
    },
    /// A quantization whose formats a recipe cannot replace.
    #[error("{recipe}: base must be a quantization to ferrule's integer formats, such as int4, got {quantization}")]
    Base {
        /// Name of the recipe.
        recipe: String,
        /// Name of the quantization.
        quantization: &'static str,
    },
    /// A pattern that matches no quantized matrix.
    #[error("{recipe}: {pattern:?} must match a quantized matrix of the model, such as {example:?}")]
    Unmatched {
        /// Name of the recipe.
        recipe: String,
        /// Pattern of tensor names.
        pattern: String,
        /// Name of a matrix that the model has.
        example: String,
    },
    /// Rows that a tensor does not have, or that do not begin and end with panels.
    #[error(
        "{recipe}: rows of {pattern:?} must be a range [first:end] of the {rows} rows of the matrix, whose bounds are \
         multiples of 16 (or the end of the matrix)"
    )]
    Rows {
        /// Name of the recipe.
        recipe: String,
        /// Pattern of tensor names, with the rows.
        pattern: String,
        /// Number of rows of the matrix.
        rows: usize,
    },
    /// A range of rows of a tensor that holds several matrices, or of a matrix in several tensors.
    #[error(
        "{recipe}: {pattern:?} has a range of rows, but a range needs a tensor that is one whole matrix; remove the range"
    )]
    RowsOfPart {
        /// Name of the recipe.
        recipe: String,
        /// Pattern of tensor names, with the rows.
        pattern: String,
    },
    /// Two tensors of one matrix whose rows cannot have different formats.
    #[error(
        "{recipe}: {tensor:?} must have the format of {other:?} ({expected}), got {found}: both are rows of one matrix, \
         and their numbers of rows are not multiples of 16"
    )]
    Mixed {
        /// Name of the recipe.
        recipe: String,
        /// Tensor whose format cannot be used.
        tensor: String,
        /// Tensor that shares the matrix.
        other: String,
        /// Format of `other`.
        expected: &'static str,
        /// Format of `tensor`.
        found: &'static str,
    },
}

impl Recipe {
    /// Formats to which matrices can be quantized, narrowest first.
    pub const FORMATS: &'static [Format] = &[
        Format::Trellis2,
        Format::Int2,
        Format::Trellis3,
        Format::Int3,
        Format::Trellis4,
        Format::Int4,
        Format::Trellis5,
        Format::Int5,
        Format::Int6,
        Format::Int8,
    ];

    /// Creates a recipe from patterns of tensor names and the names of their formats. `*` in a pattern matches any
    /// characters, and `[first:end]` after it limits the format to some rows. `name` names the recipe in errors.
    ///
    /// # Errors
    /// [`RecipeError::Format`].
    pub fn new(name: &str, rules: Vec<(String, String)>) -> Result<Self, RecipeError> {
        let rules = rules.into_iter().map(|(written, found)| {
            let Some(format) = Self::FORMATS.iter().copied().find(|format| format.name() == found) else {
                return Err(RecipeError::Format { recipe: name.to_owned(), pattern: written, found });
            };
            let (pattern, rows) = split_rows(&written);
            let pattern = without_suffix(pattern).to_owned();
            Ok(Rule { written, pattern, rows, format })
        });
        let rules = rules.collect::<Result<Vec<_>, _>>()?;
        let (of_rows, whole): (Vec<_>, Vec<_>) = (0..rules.len()).partition(|rule| rules[*rule].rows.is_some());
        let (patterns, exact): (Vec<_>, Vec<_>) = whole.into_iter().partition(|rule| is_pattern(&rules[*rule].pattern));
        let exact = exact.into_iter().map(|rule| (rules[rule].pattern.clone(), rule)).collect();
        Ok(Self { name: name.to_owned(), rules, exact, patterns, of_rows })
    }

    /// Returns the format of the rows of a tensor for which no rule has rows, if the recipe has one.
    pub(crate) fn format(&self, tensor: &TensorSpec) -> Option<Format> {
        self.whole_rule(tensor).map(|rule| self.rules[rule].format)
    }

    /// Returns the last rule that matches all rows of a tensor.
    fn whole_rule(&self, tensor: &TensorSpec) -> Option<usize> {
        let exact = names_of(tensor).filter_map(|name| self.exact.get(name).copied()).max();
        let pattern = self.patterns.iter().rev().copied().find(|rule| self.rules[*rule].matches(tensor));
        exact.max(pattern)
    }

    /// Returns the formats of the rows of a tensor in turn, with the number of rows of each; `usual` is that of rows
    /// that no rule names.
    ///
    /// # Errors
    /// [`RecipeError::Rows`] and [`RecipeError::RowsOfPart`].
    pub(crate) fn row_formats(
        &self,
        tensor: &TensorSpec,
        usual: Format,
        rows: usize,
    ) -> Result<Vec<(Format, usize)>, RecipeError> {
        let whole = self.whole_rule(tensor);
        let mut bounds = vec![(0, usual)];
        // The format from each bound on, where later rules replace what earlier ones gave their rows.
        for rule in self.of_rows.iter().filter(|rule| whole.is_none_or(|whole| **rule > whole)) {
            let Rule { written, rows: Some(range), format, .. } = &self.rules[*rule] else { continue };
            if !self.rules[*rule].matches(tensor) {
                continue;
            }
            if tensor.names.len() > 1 || tensor.part.is_some() || tensor.stack.is_some() {
                return Err(RecipeError::RowsOfPart { recipe: self.name.clone(), pattern: written.clone() });
            }
            let is_end = |bound: usize| bound == rows || bound.is_multiple_of(LANES);
            if range.is_empty() || range.end > rows || !range.start.is_multiple_of(LANES) || !is_end(range.end) {
                return Err(RecipeError::Rows { recipe: self.name.clone(), pattern: written.clone(), rows });
            }
            let after = bounds.iter().rev().find(|(first, _)| *first <= range.end).map_or(usual, |bound| bound.1);
            bounds.retain(|(first, _)| !(range.start..=range.end).contains(first));
            bounds.extend([(range.start, *format), (range.end, after)]);
            bounds.sort_unstable_by_key(|(first, _)| *first);
        }
        bounds.retain(|(first, _)| *first < rows);
        let ends = bounds.iter().skip(1).map(|(first, _)| *first).chain([rows]);
        Ok(bounds.iter().zip(ends).map(|((first, format), end)| (*format, end - first)).collect())
    }

    /// Checks that the formats of a quantization can be replaced.
    pub(crate) fn check_base(&self, quantization: Quantization) -> Result<(), RecipeError> {
        if quantization.takes_recipes() {
            return Ok(());
        }
        Err(RecipeError::Base { recipe: self.name.clone(), quantization: quantization.name() })
    }

    /// Checks that each pattern matches one of the quantized matrices of a model.
    pub(crate) fn check(&self, tensors: &[&TensorSpec]) -> Result<(), RecipeError> {
        let names: HashSet<_> = tensors.iter().flat_map(|tensor| names_of(tensor)).collect();
        let is_matched = |pattern: &str| match is_pattern(pattern) {
            true => names.iter().any(|name| matches(pattern, name)),
            false => names.contains(pattern),
        };
        match self.rules.iter().find(|rule| !is_matched(&rule.pattern)) {
            Some(rule) => Err(RecipeError::Unmatched {
                recipe: self.name.clone(),
                pattern: rule.written.clone(),
                example: tensors.first().map_or_else(String::new, |tensor| tensor_name(tensor).to_owned()),
            }),
            None => Ok(()),
        }
    }

    /// Checks that the rows of each role got the format that the recipe asks for: `formats` are those of the roles of
    /// one matrix, all of whose rows are packed as `packed` if they cannot have several formats.
    pub(crate) fn check_matrix(
        &self,
        formats: &[(&TensorSpec, Format)],
        packed: &[(Format, usize)],
    ) -> Result<(), RecipeError> {
        let &[(widest, _)] = packed else { return Ok(()) };
        let mixed = formats.iter().find(|(tensor, format)| *format != widest && self.format(tensor).is_some());
        let other = formats.iter().find(|(_, format)| *format == widest);
        match (mixed, other) {
            (Some((tensor, found)), Some((other, _))) => Err(RecipeError::Mixed {
                recipe: self.name.clone(),
                tensor: tensor_name(tensor).to_owned(),
                other: tensor_name(other).to_owned(),
                expected: widest.name(),
                found: found.name(),
            }),
            _ => Ok(()),
        }
    }
}

impl Rule {
    /// Returns whether the pattern matches a tensor.
    fn matches(&self, tensor: &TensorSpec) -> bool {
        names_of(tensor).any(|name| matches(&self.pattern, name))
    }
}

/// Splits a pattern from the range of rows after it, if there is one.
fn split_rows(written: &str) -> (&str, Option<Range<usize>>) {
    let split = || {
        let (pattern, range) = written.strip_suffix(']')?.rsplit_once('[')?;
        let (first, end) = range.split_once(':')?;
        Some((pattern, first.parse().ok()?..end.parse().ok()?))
    };
    split().map_or((written, None), |(pattern, rows)| (pattern, Some(rows)))
}

/// Returns the name by which recipes refer to some rows of a tensor.
pub(crate) fn rows_name(tensor: &str, rows: &Range<usize>) -> String {
    format!("{tensor}[{}:{}]", rows.start, rows.end)
}

/// Returns the name by which recipes refer to a tensor: its first name, without the ending of matrices.
pub(crate) fn tensor_name(tensor: &TensorSpec) -> &str {
    without_suffix(&tensor.names[0])
}

fn names(formats: &[Format]) -> Vec<&'static str> {
    formats.iter().map(|format| format.name()).collect()
}

fn without_suffix(name: &str) -> &str {
    name.strip_suffix(SUFFIX).unwrap_or(name)
}

fn is_pattern(name: &str) -> bool {
    name.contains('*')
}

/// Returns all names that a tensor can have, without the ending of matrices. An alternative has no second one.
fn names_of(tensor: &TensorSpec) -> impl Iterator<Item = &str> {
    let other = tensor.alternative.iter().flat_map(|other| &other.names);
    tensor.names.iter().chain(other).map(|name| without_suffix(name))
}

/// Returns whether `name` matches `pattern`, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(start) else { return false };
    let Some((middle, end)) = rest.rsplit_once('*') else { return left.ends_with(rest) };
    for part in middle.split('*') {
        let Some(found) = left.find(part) else { return false };
        left = &left[found + part.len()..];
    }
    left.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str) -> TensorSpec {
        TensorSpec {
            names: vec![name.to_owned()],
            transposed: false,
            part: None,
            stack: None,
            exponential: None,
            alternative: None,
        }
    }

    fn recipe(rules: &[(&str, &str)]) -> Result<Recipe, RecipeError> {
        Recipe::new("r.toml", rules.iter().map(|(pattern, format)| ((*pattern).into(), (*format).into())).collect())
    }

    #[test]
    fn ranges_of_rows_need_one_whole_matrix() {
        let recipe = recipe(&[("a[0:16]", "int8")]).unwrap();
        assert!(recipe.row_formats(&tensor("a"), Format::Int4, 32).is_ok());
        let [mut part, mut stacked, mut several] = [tensor("a"), tensor("a"), tensor("a")];
        part.part = Some(crate::spec::PartSpec { first: 32, rows: 32, stride: 64 });
        stacked.stack = Some(crate::spec::StackSpec { index: 1, of: 2 });
        several.names.push("b".to_owned());
        for tensor in [part, stacked, several] {
            let found = recipe.row_formats(&tensor, Format::Int4, 32);
            assert!(matches!(found, Err(RecipeError::RowsOfPart { .. })), "{found:?}");
        }
    }

    #[test]
    fn stars_match_any_characters() {
        for (pattern, name, expected) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("*", "", true),
            ("*", "a.b", true),
            ("a*", "ba", false),
            ("*b", "a.b", true),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("l.*.mlp.*_proj", "l.10.mlp.up_proj", true),
            ("l.*.mlp.*_proj", "l.10.attn.up_proj", false),
            ("*a*b*", "b.a", false),
            ("*a*b*", "a.b", true),
            ("a**b", "a.b", true),
            ("*x*x", "x", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn the_last_rule_that_matches_counts() {
        let recipe = recipe(&[("l.*", "int6"), ("l.0.up.weight", "int8"), ("m", "int4")]).unwrap();
        assert_eq!(recipe.format(&tensor("l.0.up.weight")), Some(Format::Int8));
        assert_eq!(recipe.format(&tensor("l.0.up")), Some(Format::Int8));
        assert_eq!(recipe.format(&tensor("l.1.up.weight")), Some(Format::Int6));
        assert_eq!(recipe.format(&tensor("n.weight")), None);
        let moved = TensorSpec { alternative: Some(Box::new(tensor("m.weight"))), ..tensor("n.weight") };
        assert_eq!(recipe.format(&moved), Some(Format::Int4));
    }

    #[test]
    fn rows_have_the_format_of_the_last_rule_that_matches_them() {
        use Format::{Int3, Int4, Int6, Int8};
        let recipe = recipe(&[
            ("e[0:16]", "int3"),
            ("e", "int6"),
            ("e.weight[0:64]", "int8"),
            ("*[32:48]", "int4"),
            ("e[96:100]", "int3"),
        ]);
        let recipe = recipe.unwrap();
        assert_eq!(recipe.format(&tensor("e.weight")), Some(Int6));
        let expected = [(Int8, 32), (Int4, 16), (Int8, 16), (Int6, 32), (Int3, 4)];
        assert_eq!(recipe.row_formats(&tensor("e.weight"), Int6, 100).unwrap(), expected);
        assert_eq!(recipe.row_formats(&tensor("l"), Int8, 48).unwrap(), [(Int8, 32), (Int4, 16)]);
        let whole = Recipe::new("r", vec![("e[0:100]".into(), "int3".into())]).unwrap();
        assert_eq!(whole.row_formats(&tensor("e"), Int6, 100).unwrap(), [(Int3, 100)]);
    }

    #[test]
    fn rows_that_a_matrix_does_not_have_are_refused() {
        for rows in ["[0:104]", "[8:16]", "[0:24]", "[16:16]", "[32:16]"] {
            let pattern = format!("e{rows}");
            let recipe = recipe(&[(&pattern, "int3")]).unwrap();
            let error = recipe.row_formats(&tensor("e"), Format::Int4, 100).unwrap_err().to_string();
            assert!(error.starts_with(&format!("r.toml: rows of \"{pattern}\" must be a range")), "{error}");
        }
        assert!(recipe(&[("e[0:x]", "int3")]).unwrap().check(&[&tensor("e")]).is_err());
    }

    #[test]
    fn a_pattern_replaces_names_before_it() {
        let recipe =
            recipe(&[("l.0.up", "int8"), ("l.1.up", "int8"), ("l.0.*", "int6"), ("l.1.up.weight", "int4")]).unwrap();
        assert_eq!(recipe.format(&tensor("l.0.up.weight")), Some(Format::Int6));
        assert_eq!(recipe.format(&tensor("l.1.up.weight")), Some(Format::Int4));
        assert!(recipe.check(&[&tensor("l.0.up"), &tensor("l.1.up.weight")]).is_ok());
        let error = recipe.check(&[&tensor("l.0.up.weight")]).unwrap_err();
        assert!(error.to_string().starts_with("r.toml: \"l.1.up\" must match"), "{error}");
    }

    #[test]
    fn faults_are_named() {
        let message = recipe(&[("l.*", "bf16")]).unwrap_err().to_string();
        assert_eq!(
            message,
            "r.toml: format of \"l.*\" must be one of trellis2, int2, trellis3, int3, trellis4, int4, trellis5, int5, int6, int8, got \"bf16\""
        );
        let recipe = recipe(&[("l.*", "int6"), ("k.*", "int6")]).unwrap();
        let message = recipe.check(&[&tensor("l.0.up.weight")]).unwrap_err().to_string();
        assert_eq!(message, "r.toml: \"k.*\" must match a quantized matrix of the model, such as \"l.0.up\"");
    }

    #[test]
    fn bases_without_integer_formats_are_refused() {
        let recipe = recipe(&[]).unwrap();
        for quantization in Quantization::ALL {
            let takes = matches!(quantization.name(), "int8" | "int4");
            assert_eq!(recipe.check_base(*quantization).is_ok(), takes, "{}", quantization.name());
        }
        let error = recipe.check_base(Quantization::STORED).unwrap_err().to_string();
        assert!(error.starts_with("r.toml: base must be") && error.ends_with("got stored"), "{error}");
    }

    #[test]
    fn rows_of_a_matrix_that_cannot_have_several_formats_are_named() {
        let recipe = recipe(&[("k", "int4"), ("v", "int6")]).unwrap();
        let (k, v) = (tensor("k.weight"), tensor("v.weight"));
        let formats = [(&k, Format::Int4), (&v, Format::Int6)];
        assert!(recipe.check_matrix(&formats, &[(Format::Int4, 16), (Format::Int6, 8)]).is_ok());
        let error = recipe.check_matrix(&formats, &[(Format::Int6, 16)]).unwrap_err().to_string();
        assert!(error.starts_with("r.toml: \"k\" must have the format of \"v\" (int6), got int4: "), "{error}");
    }
}
