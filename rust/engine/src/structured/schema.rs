//! JSON schemas: what the compiler's own limits do not bound is bounded here, by counting.

use std::collections::BTreeMap;

use serde_json::{Number, Value, json};

use super::Whitespace;

/// White space between the parts of JSON, in one place: enough for pretty-printing, and no model gets lost in it.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";
/// Where the compiler looks for its own options in a schema.
const OPTIONS: &str = "x-guidance";

/// Properties of an object: the work of compiling them grows with their square, and so does that of a mask.
const MAX_PROPERTIES: usize = 1000;
/// The number that others must be multiples of: there is a state of the lexer for each remainder.
const MAX_MULTIPLE: u128 = 10_000;
/// Schemas within schemas, through references too: the compiler calls itself for each, with some kilobytes of stack.
const MAX_LEVELS: usize = 5000;

/// Where a schema may have others that hold at the same time.
const COMBINING: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];

/// A schema with what the compiler reads beside it. Members keep their order, which is that of the output.
pub(super) fn read(text: &str, whitespace: &Whitespace) -> Result<Value, String> {
    let mut schema: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    check(&schema)?;
    let options = match whitespace {
        Whitespace::Some => json!({"whitespace_pattern": WHITESPACE}),
        Whitespace::None => json!({"whitespace_flexible": false}),
        Whitespace::Pattern(pattern) => json!({"whitespace_pattern": pattern}),
    };
    match &mut schema {
        Value::Object(members) if members.contains_key(OPTIONS) => {
            return Err(format!("{OPTIONS} is not supported: some of it would allow what the schema forbids"));
        }
        Value::Object(members) => _ = members.insert(OPTIONS.into(), options),
        Value::Bool(true) => schema = json!({OPTIONS: options}),
        Value::Bool(false) => return Err("nothing satisfies the schema false".into()),
        _ => return Err("a schema is an object, or true".into()),
    }
    Ok(schema)
}

/// Checks what compiling takes.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    let mut found = Found::default();
    found.look_through(schema, 0)?;
    found.check_multiples()?;
    let levels = found.levels(schema);
    if levels > MAX_LEVELS {
        return Err(format!("its references lead {levels} levels deep; the limit is {MAX_LEVELS}"));
    }
    Ok(())
}

/// What a schema has in it.
#[derive(Default)]
struct Found {
    multiples: Vec<Number>,
    /// Whether several may hold of one number.
    combines: bool,
    /// References, and how deep each is nested at the most.
    references: BTreeMap<String, usize>,
}

impl Found {
    fn look_through(&mut self, value: &Value, depth: usize) -> Result<(), String> {
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.look_through(item, depth + 1)),
            Value::Object(members) => members.iter().try_for_each(|(name, member)| {
                match member {
                    Value::Object(properties) if name == "properties" && properties.len() > MAX_PROPERTIES => {
                        let count = properties.len();
                        return Err(format!("an object has {count} properties; the limit is {MAX_PROPERTIES}"));
                    }
                    Value::Number(number) if name == "multipleOf" => self.multiples.push(number.clone()),
                    Value::String(target) if name == "$ref" => {
                        let deepest = self.references.entry(target.clone()).or_default();
                        *deepest = depth.max(*deepest);
                    }
                    _ => {}
                }
                self.combines |= COMBINING.contains(&name.as_str());
                self.look_through(member, depth + 1)
            }),
            _ => Ok(()),
        }
    }

    /// Checks each multiple, or where several may hold at once what is a multiple of all.
    fn check_multiples(&self) -> Result<(), String> {
        let parts: Vec<(u128, i32)> = self.multiples.iter().filter_map(digits).collect();
        let lowest = parts.iter().map(|(_, exponent)| *exponent).min().unwrap_or(0).min(0);
        let whole = |&(digits, exponent): &(u128, i32), lowest: i32| {
            let zeros = u32::try_from(exponent - lowest).unwrap_or(0);
            digits.saturating_mul(10_u128.saturating_pow(zeros))
        };
        let largest = if self.combines {
            parts.iter().fold(1, |sum, part| least_common_multiple(sum, whole(part, lowest)))
        } else {
            parts.iter().map(|part| whole(part, part.1.min(0))).max().unwrap_or(1)
        };
        if largest <= MAX_MULTIPLE {
            return Ok(());
        }
        Err(format!("its multipleOf come to {largest} units of their last decimal; the limit is {MAX_MULTIPLE}"))
    }

    /// Levels that the compiler may be in at once, at the most: each target of a reference is compiled once, in the
    /// midst of whatever refers to it first.
    fn levels(&self, schema: &Value) -> usize {
        let deepest = |target: &str| {
            let target = target.strip_prefix('#').and_then(|pointer| schema.pointer(pointer)).unwrap_or(&Value::Null);
            1 + deepest_reference(target).unwrap_or(0)
        };
        self.references.keys().map(|target| deepest(target)).sum::<usize>() + deepest_reference(schema).unwrap_or(0)
    }
}

/// How deep the deepest reference is nested, if there is one.
fn deepest_reference(value: &Value) -> Option<usize> {
    match value {
        Value::Array(items) => items.iter().filter_map(deepest_reference).max().map(|depth| depth + 1),
        Value::Object(members) => {
            let own = members.get("$ref").map(|_| 0);
            own.max(members.values().filter_map(deepest_reference).max().map(|depth| depth + 1))
        }
        _ => None,
    }
}

/// The decimal digits of a number as a whole number, and the exponent of ten that goes with it.
fn digits(number: &Number) -> Option<(u128, i32)> {
    let text = format!("{:e}", number.as_f64()?.abs());
    let (mantissa, exponent) = text.split_once('e')?;
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let exponent = exponent.parse::<i32>().ok()? - i32::try_from(fraction.len()).ok()?;
    Some((format!("{whole}{fraction}").parse().ok()?, exponent))
}

fn least_common_multiple(a: u128, b: u128) -> u128 {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a.checked_div(divisor).map_or(0, |factor| factor.saturating_mul(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiples_are_counted_in_their_last_decimal() {
        let refused = |schema: Value| check(&schema).err().unwrap_or_default();
        for number in ["7", "0.01", "10000", "2.5e-3", "1e4", "0.9973"] {
            let number: Value = serde_json::from_str(number).unwrap();
            assert_eq!(refused(json!({"multipleOf": number})), "", "{number}");
        }
        assert!(refused(json!({"items": {"multipleOf": 10_007}})).contains("10007"));
        assert!(refused(json!({"multipleOf": 1e5})).contains("100000"));
        let two = json!([{"multipleOf": 101}, {"multipleOf": 103}]);
        assert_eq!(refused(json!({"prefixItems": two})), "");
        assert!(refused(json!({"allOf": two})).contains("10403"));
        assert!(refused(json!({"allOf": [{"multipleOf": 0.5}, {"multipleOf": 3001}]})).contains("30010"));
    }

    #[test]
    fn references_are_followed_in_the_count_of_levels() {
        let chain = |length: usize| {
            let link = |index: usize| json!({"items": {"$ref": format!("#/$defs/d{}", index + 1)}});
            let definitions = (0..length).map(|index| (format!("d{index}"), link(index)));
            json!({"$ref": "#/$defs/d0", "$defs": definitions.collect::<serde_json::Map<_, _>>()})
        };
        assert_eq!(check(&chain(1000)), Ok(()));
        assert!(check(&chain(3000)).unwrap_err().contains("levels"));
    }

    #[test]
    fn properties_are_counted() {
        let wide = |count: usize| {
            let properties = (0..count).map(|index| (format!("p{index}"), json!({})));
            json!({"items": {"properties": properties.collect::<serde_json::Map<_, _>>()}})
        };
        assert_eq!(check(&wide(1000)), Ok(()));
        assert!(check(&wide(1001)).unwrap_err().contains("1001"));
    }
}
