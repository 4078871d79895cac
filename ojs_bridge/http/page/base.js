// Preact and htm, so that a text of a job is always text, and never hides what it is.

import htm from "./vendor/htm.js";
import {
  Component, h, render, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "./vendor/preact.js";
import { seen } from "./words.js";

export { Component, render, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState };

const TOLD = ["title", "aria-label", "placeholder", "label"];
const spelt = (value) => (typeof value === "string" ? seen(value) : Array.isArray(value) ? value.map(spelt) : value);

// Each text among the children, and each one that an attribute tells, is spelt out. A field's value stays as it is.
function safe(type, props, ...children) {
  const told = typeof type === "string" ? TOLD.filter((name) => typeof props?.[name] === "string") : [];
  const given = Object.fromEntries(told.map((name) => [name, seen(props[name])]));
  return h(type, told.length ? { ...props, ...given } : props, ...children.map(spelt));
}

export const html = htm.bind(safe);
